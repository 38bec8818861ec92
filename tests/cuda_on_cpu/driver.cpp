// One compiled unit as a library: CF_UNIT is the unit's file, CF_ENTRY its function, CF_PARAMS the
// type of the function's parameter.
#include "fibers.h"

#ifdef CF_RACES
// Makes base.cuh inline what a GPU's compiler inlines. GCC does not report what a function writes
// to the place of its result, and that may be shared memory.
#define __CUDACC__
#endif
#include CF_UNIT

// Runs the kernel on `grid` blocks. skip: the name of a barrier to leave out, or "".
// fill: the byte that shared memory starts with.
// Returns what `fibers::launch` does; 3 if the parameters have another size.
EXPORT int run(const void* params, size_t size, unsigned grid, unsigned threads,
               size_t shared_bytes, uint64_t seed, const char* skip, int fill) {
  CF_PARAMS p;
  if (size != sizeof p) return 3;
  memcpy(&p, params, size);
  return fibers::launch([&] { CF_ENTRY(p); }, grid, threads, shared_bytes, seed, skip, fill);
}
