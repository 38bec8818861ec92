// Results of a warp that leave through shared memory, by the TMA unit: a unit to test alone.
#pragma once

#include "ptx/hopper.cuh"
#include "convert.cuh"

namespace cf {

struct StoreParams {
  TensorMap map;   // boxes of 16 rows of 64 columns
};

// Element (row, column) of what is stored: exact in every type.
CF_DEVICE float stored(int row, int column) { return float((37 * row + column) % 251 - 125); }

// 16 rows of `columns` columns, through one place for a panel.
template <typename T, int columns>
CF_DEVICE void store_rows(const StoreParams& p) {
  CF_DYNAMIC_SHARED(memory);
  const SmemAddress place = ptx::smem_address(memory);
  const int lane = int(threadIdx.x), column0 = lane % 4 * 2;
  for (int panel = 0; panel < columns / PANEL; ++panel) {
    if (lane == 0) ptx::stores_read<0>("panel_read");
    ptx::sync_warp("place_free");
    for (int chunk = 0; chunk < 8; chunk += 2) {
      uint32 x[4];
      for (int m = 0; m < 4; ++m) {
        const int row = lane / 4 + m % 2 * 8;
        const int column = panel * PANEL + (chunk + m / 2) * 8 + column0;
        x[m] = ptx::pack<T>(stored(row, column), stored(row, column + 1));
      }
      const int own = (chunk + lane / 16) ^ lane % 8;
      ptx::store_matrices(place + lane % 16 * PANEL_ROW_BYTES + own * 16, x);
    }
    ptx::fence_async_reads("panel_fenced");
    ptx::sync_warp("panel_written");
    if (lane == 0) {
      ptx::store_box(p.map, place, panel * PANEL, 0, 0, 0);
      ptx::stores_commit();
    }
  }
  if (lane == 0) ptx::stores_read<0>("last_panel_read");
}

}  // namespace cf
