// Settled: the options of a group as its engine runs them, which depend on how many ranks there are
// and on their links.
//
// A pure function of what all ranks know, so that they decide alike, and the simulator as they do.
#ifndef THINWIRE_SCHEDULE_SETTLE_H_
#define THINWIRE_SCHEDULE_SETTLE_H_

#include <optional>
#include <utility>

#include "schedule/collective/hierarchy.h"
#include "schedule/options.h"

namespace thinwire {

// Only Settle makes it, so whoever gets one knows that its codecs, topology and chunk_bytes hold.
class Settled {
 public:
  const Options& operator*() const { return options_; }
  const Options* operator->() const { return &options_; }
  int world() const { return world_; }

 private:
  friend Settled Settle(Options options, int world, const std::optional<LinkRates>& rates);
  Settled(Options options, int world) : options_(std::move(options)), world_(world) {}

  Options options_;
  int world_;
};

// Codecs first, since topk becomes int4 where that costs fewer bytes, and then goes by nodes as any
// dense codec; then the topology; then the size of chunks, which depends on both.
//
// `rates`: of the links inside nodes of options.local_size ranks, and between them, if they are
// known; kAuto then becomes kHierarchical where that pays. In a world of one nothing changes.
Settled Settle(Options options, int world, const std::optional<LinkRates>& rates = std::nullopt);

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_SETTLE_H_
