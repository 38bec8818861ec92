"""``python -m cupy_flash``."""

import sys

from cupy_flash.cli import main

if __name__ == "__main__":
    sys.exit(main())
