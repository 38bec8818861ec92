// Instructions of sm_90a beside the products: barriers in shared memory, copies of tiles by the
// TMA unit, registers that move between warpgroups, named barriers of a block.
#pragma once

#include "mma.cuh"
#include "shared.cuh"

namespace cf {

// What the driver's cuTensorMapEncodeTiled writes: where an array lies, its extents and strides,
// and the box of it that one copy moves. A kernel's argument, never a copy on its stack.
struct alignas(64) TensorMap {
  uint64 opaque[16];
};

// Where the rows of a 16-bit operand lie in shared memory: in panels of 64 columns, a row of a
// panel in 128 bytes, its chunk c of 16 bytes at place c ^ (row % 8).
constexpr int PANEL = 64;
constexpr int PANEL_ROW_BYTES = 128;
constexpr int PANEL_ALIGNMENT = 1024;     // eight rows, after which the places repeat

// Bytes of a tile's panels.
CF_HOST_DEVICE constexpr int panels_bytes(int rows, int columns) {
  return rows * ceil_div(columns, PANEL) * PANEL_ROW_BYTES;
}

}  // namespace cf

#ifndef CF_PTX_TWIN

namespace cf::ptx {

// Barriers: eight bytes of shared memory that count arrivals and, where copies report to them,
// bytes. `arrivals` complete a phase.
CF_DEVICE void barrier_init(SmemAddress barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
               :
               : "r"(barrier), "r"(arrivals)
               : "memory");
}

// Makes initialised barriers visible to the TMA unit. The block's threads still have to meet.
CF_DEVICE void barriers_ready() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

CF_DEVICE void barrier_arrive(SmemAddress barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];"
               :
               : "r"(barrier)
               : "memory");
}

// One arrival, and `bytes` more to come from copies before the phase is complete.
CF_DEVICE void barrier_expect(SmemAddress barrier, uint32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :
               : "r"(barrier), "r"(bytes)
               : "memory");
}

// Whether the phase of this parity is complete; waits a while for it.
CF_DEVICE bool barrier_try(SmemAddress barrier, uint32 parity) {
  uint32 done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// The same without waiting.
CF_DEVICE bool barrier_test(SmemAddress barrier, uint32 parity) {
  uint32 done;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// Waits for the phase of this parity. With CF_TRAP_AFTER, a number of polls, a wait that does not
// end prints `name` and stops the kernel.
CF_DEVICE void barrier_wait(SmemAddress barrier, uint32 parity, const char* name) {
#ifdef CF_TRAP_AFTER
  for (long long polls = 0; !barrier_try(barrier, parity); ++polls) {
    if (polls == CF_TRAP_AFTER) {
      printf("block %d, thread %d waits for ever at barrier %s, parity %d\n", int(blockIdx.x),
             int(threadIdx.x), name, int(parity));
      __trap();
    }
  }
#else
  while (!barrier_try(barrier, parity)) {
  }
#endif
}

// Copies the box at the coordinates (innermost first) to `to`, which is aligned to 1,024 bytes;
// what lies outside the array becomes zero. `full` counts the whole box's bytes.
CF_DEVICE void load_box(SmemAddress to, const TensorMap& map, SmemAddress full, int c0, int c1,
                        int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];"
      :
      : "r"(to), "l"(&map), "r"(full), "r"(c0), "r"(c1), "r"(c2),
        "r"(c3)
      : "memory");
}

// The same, as far as the L2 cache.
CF_DEVICE void fetch_box(const TensorMap& map, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];"
               :
               : "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}

// Copies a box from shared memory to the array; what lies outside of it is left out. The copy reads
// shared memory until `stores_read` says that it has: groups of copies belong to the thread that
// starts them. What threads wrote there must be fenced, by `fence_async_reads`.
CF_DEVICE void store_box(const TensorMap& map, SmemAddress from, int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
      :
      : "l"(&map), "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}
CF_DEVICE void stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until all but the latest `pending` groups have been read.
template <int pending>
CF_DEVICE void stores_read(const char*) {
  asm volatile("cp.async.bulk.wait_group.read %0;" : : "n"(pending) : "memory");
}

// A warp stores four matrices of 8 x 8 elements of 16 bits: x[m] of lane t is row t / 4, columns
// 2 (t % 4) and one more, of matrix m; `to` of the lanes 8 m ... 8 m + 7: where its rows go.
CF_DEVICE void store_matrices(SmemAddress to, const uint32 (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               :
               : "r"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

CF_DEVICE void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" : : "l"(&map) : "memory");
}

// 16 bytes of zeros.
CF_DEVICE void store_zeros(SmemAddress to) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" : : "r"(to), "r"(0) : "memory");
}

// Orders this thread's writes to shared memory before reads by the TMA unit and by wgmma. The
// threads that wrote still have to meet those that start the reads.
CF_DEVICE void fence_async_reads(const char*) {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Hands registers between the warpgroups of a block; all threads of a warpgroup together. The sum
// over the block may not pass what the launch allocated: a raise that cannot be met waits for ever.
template <int registers>
CF_DEVICE void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(registers));
}
template <int registers>
CF_DEVICE void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(registers));
}

CF_DEVICE void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" : : "r"(id), "r"(threads) : "memory");
}

// Waits as well, and returns whether any of the threads says yes.
CF_DEVICE bool named_barrier_any(int id, int threads, bool yes, const char*) {
  uint32 any;
  asm volatile(
      "{\n.reg .pred p, q;\n"
      "setp.ne.u32 p, %1, 0;\n"
      "bar.red.or.pred q, %2, %3, p;\n"
      "selp.u32 %0, 1, 0, q;\n}"
      : "=r"(any)
      : "r"(uint32(yes)), "r"(id), "r"(threads)
      : "memory");
  return any != 0;
}

// x, which is the same in all lanes of the warp, where the compiler can tell that it is.
template <typename X>
CF_DEVICE X uniform(X x) {
  return __shfl_sync(0xFFFFFFFF, x, 0);
}

// Waits for ever if x is not 0: a place that code which x depends on cannot be moved behind, nor
// code behind it to before.
CF_DEVICE void require_zero(uint32 x) {
  while (x != 0) asm volatile("nanosleep.u32 1000;" ::: "memory");
}

// 1 for a negative number; 0 for all others and for the NaN that arithmetic gives.
CF_DEVICE uint32 sign_of(float x) { return __float_as_uint(x) >> 31; }

}  // namespace cf::ptx

#else
#include CF_HOPPER_TWIN
#endif
