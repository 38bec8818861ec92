"""What the bench shares with the tests: their cases, answers and rules of exactness."""

from answers import answers_to, floors, judge
from cases import CASES, KINDS, Case, forms, inputs
from numerics import CANCELLED, DRAWS, eps, largest_of_nearest, row_norms

__all__ = ["CANCELLED", "CASES", "DRAWS", "KINDS", "Case", "answers_to", "eps", "floors", "forms",
           "inputs", "judge", "largest_of_nearest", "row_norms"]
