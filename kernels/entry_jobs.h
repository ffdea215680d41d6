// The launches of codecs of entries (jobs.h has those of all others), and the memory that an
// encoding uses.
#ifndef THINWIRE_KERNELS_ENTRY_JOBS_H_
#define THINWIRE_KERNELS_ENTRY_JOBS_H_

#include "kernels/jobs.h"
#include "kernels/tile.h"

namespace thinwire::kernels {

// A key has 31 bits: digits of 11, 10 and 10, the highest first.
inline constexpr unsigned kDigits = 3;
inline constexpr unsigned kBins = 2048;

// State that the kernels of one encoding share.
struct EntryState {
  uint32_t low;                    // elements with at least this key are candidates
  uint32_t found;                  // number of candidates
  uint32_t unlisted;               // tiles whose candidates are not in the list
  uint32_t key;                    // the known digits of the k-th largest key
  uint32_t wanted;                 // how many elements with these digits are among the k largest
  uint32_t finished[kDigits + 1];  // number of finished teams, by kernel
  uint32_t bins[kDigits][kBins];
};

// Where the scan has stored the x of a tile.
struct EntryTile {
  static constexpr uint32_t kKept = ~0u;      // `first`: only in the residual
  static constexpr uint32_t kAnew = ~0u - 1;  // `first`: nowhere, nothing was stored
  uint32_t first, count;  // its candidates in the list; x is in the residual too
  // Elements with a key above the k-th, and with an equal one, in earlier tiles of its group.
  uint32_t above, equal;
};

// Tiles that one team counts and sends, one per warp if only the list must be read.
inline constexpr uint32_t kGroupTiles = kThreads / kWarp;

// The elements of a group with a key above the k-th, and with an equal one; later those of all
// earlier groups.
struct EntryGroup {
  uint32_t above, equal;
};

THINWIRE_HD constexpr uint32_t GroupsOf(uint32_t tiles) {
  return (tiles + kGroupTiles - 1) / kGroupTiles;
}

struct EntryRoom {
  EntryState* state;
  EntryTile* tiles;
  EntryGroup* groups;
  uint32_t *index, *bits;  // the list of candidates
  uint32_t capacity;       // of the list
};

struct EncodeEntriesLaunch {
  DType dtype;  // of the gradient
  Elements gradient;
  Elements residual;  // floats; data null: none
  Elements velocity;  // likewise; for its meaning see EncodeArgs
  float momentum;
  bool nesterov, masking;
  Wire wire;
  size_t numel;
  uint32_t entries, tiles;
  float* threshold;  // null: none
  EntryRoom room;    // RoomOf(launch) bytes of scratch; null: taken from a pool of the device
};

// How decoded entries are used.
enum class EntryUse : uint8_t {
  kValues,  // out = value, 0 without an entry; one wire only
  kSum,     // out = the sum of factor * value over the wires, in order
  kAdd,     // the same, added to `out`
};

struct AddEntriesLaunch {
  DType dtype;  // of `out`
  Elements out;
  EntryUse use;
  float factor;
  size_t numel, codes_at;
  uint32_t entries, tiles;
  uint32_t ranks;
  const uint8_t* wires[kMaxWires];
};

static_assert(sizeof(AddEntriesLaunch) <= kArgumentBytes);

// Teams of the kernels that go through all tiles or through the list: as many as a GPU holds at
// once. Each team that counts digits clears and adds all bins once.
THINWIRE_HD constexpr uint32_t EntryTeams(uint32_t tiles) {
  return tiles < kTilesToFill ? tiles : kTilesToFill;
}

inline uint32_t EntryCapacity(size_t entries, size_t tiles) {
  const size_t most = tiles * kTile, likely = 3 * entries + kTile;
  return static_cast<uint32_t>(most < likely ? most : likely);
}

inline size_t RoomOf(const EncodeEntriesLaunch& launch) {
  return sizeof(EntryState) + launch.tiles * sizeof(EntryTile) +
         GroupsOf(launch.tiles) * sizeof(EntryGroup) +
         2 * sizeof(uint32_t) * EntryCapacity(launch.entries, launch.tiles);
}

// `memory` has RoomOf(launch) bytes or is null.
inline void PutRoom(EncodeEntriesLaunch& launch, uint8_t* memory) {
  launch.room = {};
  if (memory == nullptr) return;
  auto* const state = reinterpret_cast<EntryState*>(memory);
  auto* const notes = reinterpret_cast<EntryTile*>(state + 1);
  auto* const groups = reinterpret_cast<EntryGroup*>(notes + launch.tiles);
  auto* const index = reinterpret_cast<uint32_t*>(groups + GroupsOf(launch.tiles));
  const uint32_t capacity = EntryCapacity(launch.entries, launch.tiles);
  launch.room = {state, notes, groups, index, index + capacity, capacity};
}

inline uint8_t* MemoryOf(const EntryRoom& room) { return reinterpret_cast<uint8_t*>(room.state); }

}  // namespace thinwire::kernels

#endif  // THINWIRE_KERNELS_ENTRY_JOBS_H_
