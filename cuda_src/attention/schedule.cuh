// In which order blocks take the tiles of a problem.
#pragma once

#include "../params.cuh"

namespace cf {

// A tile of a sequence, which is a key head of a batch entry. Tiles are numbered from the longest.
struct TileCoord {
  int64 sequence, tile;
};

// The i-th. If tiles differ in length, the first ones of a wave of 32 sequences come first, then
// the second ones: with all of one sequence in a row the last long tile would be left to one block,
// and a tenth of the time to few. More sequences at a time would leave fewer blocks to share what
// is loaded of one.
CF_DEVICE TileCoord tile_coord(const Params& p, int64 i, int64 tiles) {
  constexpr int64 wave = 32;
  const bool differ = p.right < p.Nk && p.left >= p.Nk;
  if (!differ) {
    const int64 sequence = i / tiles;
    return {sequence, i - sequence * tiles};
  }
  const int64 first = i / (wave * tiles) * wave, rest = i - first * tiles;
  const int64 sequences = min(wave, p.batch * p.heads_k - first), tile = rest / sequences;
  return {first + rest - tile * sequences, tile};
}

// The same of tiles of rows, of which the last causal ones see most keys, once per split of the
// keys; of tiles of keys, of which the first causal ones are seen most, once per split of the rows.
struct SplitTile {
  int64 b, head_k, tile, split;
};
CF_DEVICE SplitTile split_tile(const Params& p, int64 task, int64 splits, int64 tiles, bool last) {
  const int64 i = splits == 1 ? task : task / splits;
  const TileCoord at = tile_coord(p, i, tiles);
  const int64 b = at.sequence / p.heads_k;
  return {b, at.sequence - b * p.heads_k, last ? tiles - 1 - at.tile : at.tile,
          task - i * splits};
}

// The tiles of blocks that stay, of heads that are worked on section by section, so that the keys
// of a section stay in the L2 cache. Within a section the tiles with the last rows come first, of
// all its heads: in causal attention they have the most keys. The blocks take tiles in waves, back
// and forth, and each section begins with a new wave, so that no block gets the longest each time.
// P has `pack`, the query heads whose rows share a tile, and `section`, heads (of `pack` query
// heads) of a section; 0: all tiles of a head, then the next head. The planner keeps tasks below
// 2^30.
template <typename Config, typename P>
struct Sections {
  const P& p;
  const int most = section_heads();        // heads of a section
  int wave = 0;
  int section = 0;         // the wave's section, and which of the section's waves it is
  int head = 0, tile = 0;  // of the task

  CF_DEVICE int tiles() const { return ceil_div(p.pack * int(p.Nq), Config::Br); }
  CF_DEVICE int heads() const { return int(p.batch) * (int(p.heads_q) / p.pack); }

  // A few more than the planner asks for, where their tiles then fill waves, there and back.
  CF_DEVICE int section_heads() const {
    const int there_and_back = 2 * int(gridDim.x);
    const int waves = ceil_div(p.section * tiles(), there_and_back) * there_and_back;
    const int filling = waves / tiles();
    return filling >= p.section && filling - p.section <= p.section / 16 ? filling : p.section;
  }

  // The next task; false if there is none.
  CF_DEVICE bool next() {
    const int blocks = int(gridDim.x), block = int(blockIdx.x);
    while (true) {
      const int first = section * most;
      const int here = p.section == 0 ? heads() : min(most, heads() - first);
      if (here <= 0) return false;
      const bool back = (wave + section) % 2 != 0;
      const int place = wave * blocks + (back ? blocks - 1 - block : block);
      const bool over = wave * blocks >= here * tiles();
      if (over && p.section == 0) return false;
      ++wave;
      if (over) {
        ++section;
        wave = 0;
      } else if (place < here * tiles()) {
        const int step = p.section == 0 ? tiles() : here;
        const int major = place / step, minor = place % step;
        head = p.section == 0 ? major : first + minor;
        tile = tiles() - 1 - (p.section == 0 ? minor : major);
        return true;
      }
    }
  }
};

}  // namespace cf
