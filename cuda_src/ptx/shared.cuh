// Into and out of shared memory: asynchronous copies, and matrices of eight rows of 16 bytes.
#pragma once

#include "../ptx.cuh"

#ifndef CF_PTX_TWIN

namespace cf::ptx {

// x, but the compiler does not know that: what is made of it is made here, and not once before a
// loop, to lie in registers that there are not.
CF_DEVICE int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Keeps x in the thread's own memory from here on, and in no registers: each part of it is loaded
// where it is used.
template <typename T>
CF_DEVICE void keep_in_memory(T& x) {
  asm volatile("" : : "l"(&x) : "memory");
}

// A place in shared memory. Sums with constants end up inside the instructions.
struct Shared {
  uint32 address;

  CF_DEVICE explicit Shared(const void* pointer) : address(smem_address(pointer)) {}
  // The same, computed here and nowhere else.
  CF_DEVICE Shared kept() const {
    Shared same = *this;
    asm volatile("" : "+r"(same.address));
    return same;
  }
  CF_DEVICE Shared operator+(int bytes) const {
    Shared sum = *this;
    sum.address += uint32(bytes);
    return sum;
  }
};

// Four 8 x 8 matrices of 16-bit elements. Lane 8 i + r names row r of matrix i; lane 4 r + t gets
// elements 2 t and 2 t + 1 of row r of matrix i as word i. Two such elements may as well be one of
// 32 bits.
CF_DEVICE void load_matrices(uint32 (&x)[4], Shared row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(row.address)
               : "memory");
}

// The same of the transposed matrices: lane 4 c + t gets rows 2 t and 2 t + 1 of column c.
CF_DEVICE void load_matrices_transposed(uint32 (&x)[4], Shared row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(row.address)
               : "memory");
}

// Starts to copy 16 bytes of global memory; zeros, and no access, if there is nothing. The bytes
// are in their place once the thread has waited, for others behind the barrier after that.
CF_DEVICE void copy_16_bytes(Shared to, uint64 from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(to.address), "l"(from), "r"(there ? 16 : 0)
               : "memory");
}

// What the thread has started to copy since the last call becomes a group.
CF_DEVICE void close_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for all groups but the `open` newest.
template <int open>
CF_DEVICE void wait_for_copies(const char*) {
  asm volatile("cp.async.wait_group %0;" : : "n"(open) : "memory");
}

// The block's barrier `id` (1 ... 15): waits until `threads` have come or arrived.
CF_DEVICE void named_barrier_wait(int id, int threads, const char*) {
  asm volatile("bar.sync %0, %1;" : : "r"(id), "r"(threads) : "memory");
}

}  // namespace cf::ptx

#endif
