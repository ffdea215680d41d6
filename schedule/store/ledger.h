// Ledger: when a push to one slice is applied, and when a pull of it is answered. Pure logic: the
// server tells it what arrives, and does what Next says.
//
// The version V of a slice is the number of updates that were applied to it. A worker's pushes are
// numbered from 1. A gradient is running from the pull that its worker computes it of (before the
// first pull, from the slice's initialisation) until it is applied; its base b is the V of that
// pull, and its age when it is applied is V - b.
//
//   sync   Step t is one update: the sum of the t-th push of every worker. It is applied when all
//          are there. A pull that follows push t is answered when V >= t.
//   async  A push is an update, applied when it arrives.
//   ssp    A push is an update. With n workers a running gradient has the deadline
//          b + staleness * n: it is applied while V is at most that. The earliest deadline goes
//          first; a push is held while its application would make another running gradient,
//          pushed or not, miss its deadline. The running gradient with the earliest deadline is
//          never held, so every held push waits for workers that are computing, and never for one
//          another.
//   sync:quorum=K  A gradient belongs to round V + 1 if it was computed of version V, the present
//          one. The round is applied as one update when every worker that computes has pushed to
//          it, or when K have and the grace is over, which whoever has a clock says. A push that is
//          late, since its round was applied without it, goes with the next round, of whose K it
//          does not count; the pull that follows it is answered at once, with the values of the
//          rounds that it has missed, so its worker is in time again with its next push. After
//          minimum quorum and grace window of "Decoupled DiLoCo", arXiv 2604.21428.
//
// Workers come and go. One that is added runs nothing until its first pull is answered, so nobody
// waits for it, and n is one more for the deadlines from then on; those that are given stay. One
// that leaves takes back its running gradient and its pulls, but what it has pushed counts: until
// that is applied, it counts as one of the n. One that is removed takes its pushes back as well.
//
// In async and ssp a pull that follows push t is answered when that push is applied. Bounded
// staleness by versions, and not by clocks as in Ho et al., "More Effective Distributed ML via a
// Stale Synchronous Parallel Parameter Server", NIPS 2013: there all end up at the speed of a
// worker that is slower for good.
#ifndef THINWIRE_SCHEDULE_STORE_LEDGER_H_
#define THINWIRE_SCHEDULE_STORE_LEDGER_H_

#include <chrono>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "schedule/store/bytes.h"

namespace thinwire {

// Numbers of workers are below it, those of workers that come later as well.
inline constexpr int kMaxStoreWorkers = 4096;

// When a push to the store is applied and when a pull is answered.
struct StoreMode {
  enum class Kind {
    kSync,    // a step is applied when every worker has pushed it
    kAsync,   // a push is applied when it arrives
    kSsp,     // as async, but no gradient is applied that is older than staleness * workers updates
    kQuorum,  // a round is applied when every worker has pushed to it; or when some have, and a
              // time has passed since then. An update is the weighted mean of what is there.
  };

  Kind kind = Kind::kSync;
  int staleness = 0;                   // kSsp: at least 1
  int quorum = 0;                      // kQuorum: workers that have pushed to a round, at least 1
  std::chrono::milliseconds grace{0};  // kQuorum: that a round waits for the others from then on

  // Parses "sync", "async", "ssp:staleness=2" or "sync:quorum=2,grace=0.5", with the grace in
  // seconds. InvalidArgument says what was expected.
  static absl::StatusOr<StoreMode> Parse(std::string_view text);
  std::string ToString() const;

  // All workers take as many steps: an update is of those that have taken one.
  bool has_steps() const { return kind == Kind::kSync || kind == Kind::kQuorum; }
  // A worker that is gone does not stop the others.
  bool goes_on_without() const { return kind != Kind::kSync; }
  friend bool operator==(const StoreMode&, const StoreMode&) = default;
};

class Ledger {
 public:
  // One thing that the server does now.
  struct Step {
    // Pushes to be applied as one update, in rank order. Empty: `pull` is answered.
    struct Push {
      int worker = 0;
      uint64_t number = 0;
      friend bool operator==(const Push&, const Push&) = default;
    };
    std::vector<Push> pushes;
    // The request that OnPull named.
    int worker = 0;
    uint64_t request = 0;
  };

  Ledger(StoreMode mode, int workers);

  // AlreadyExists for a push that was there before: it is not counted again. Internal for one whose
  // predecessor is missing. FailedPrecondition, in ssp and with a quorum, for a second push without
  // a pull between.
  absl::Status OnPush(int worker, uint64_t number);
  // A pull that follows the worker's push number `after` (0: none).
  void OnPull(int worker, uint64_t after, uint64_t request);
  // The worker waits in a call that all workers make, and pushes nothing before that has returned:
  // nobody waits for its running gradient meanwhile, nor for one of a pull that is answered then.
  void Pause(int worker);
  // Such a call returns to these workers. Their gradients run again, but for those that could not
  // be applied in time any more, beside those that run: their workers pull before they push.
  void Resume(std::span<const int> workers);
  // The worker computes nothing until its next pull: it has no running gradient.
  void Idle(int worker);
  // A worker that is not here comes, under a new number or that of one that has gone. Its pushes
  // count from 1. Not in sync, where a step is of the same workers always.
  void Add(int worker);
  bool knows(int worker) const { return worker < std::ssize(workers_); }
  // The worker pushes and pulls nothing any more.
  void Leave(int worker);
  // The worker is gone: its running gradient, pushes that are not applied, and pulls are dropped.
  void Remove(int worker);

  // With a quorum: the round waits for workers only until the grace since then is over.
  bool HasQuorum() const;
  // It is. Nothing to do without a quorum, which may have been lost meanwhile.
  void EndGrace();

  // Writes what Restore needs, when Next has nothing to do: all but pushes that are held, pulls
  // that wait, and who is paused or leaves. Whoever restores makes those calls again: OnPush,
  // OnPull, Pause, Leave.
  void Save(ByteWriter& to) const;
  // Takes it, in a new ledger of the same mode. False for bytes that are no ledger's.
  bool Restore(ByteReader& from);

  struct Pull {
    int worker;
    uint64_t after, request;
  };
  const std::deque<Pull>& pulls() const { return pulls_; }  // that are not answered

  // The next thing to do, which the server has done when it calls again.
  std::optional<Step> Next();

  uint64_t version() const { return version_; }
  // Workers that are here, or of which a push is to be applied: n of the deadlines.
  uint64_t workers() const;
  // The workers without whose pushes nothing that waits can go on; empty if nothing waits.
  std::vector<int> WaitsFor() const;

 private:
  struct Worker {
    bool here = true;
    uint64_t arrived = 0, applied = 0;  // last push
    bool running = true;                // ssp: has pulled since its last push was applied;
                                        // quorum: takes part in rounds
    bool paused = false;                // and waits for the others
    bool leaves = false;                // goes when what it has pushed is applied
    uint64_t deadline = 0;              // ssp, of what runs; quorum: the version that was pulled
    uint64_t pulled = 0;                // quorum: the last push before its last pull
    uint64_t late = 0;                  // quorum: its last push that was late
  };

  // The deadlines, in any order, can all be met from `version` on.
  static bool AreFeasible(uint64_t version, std::vector<uint64_t> deadlines);
  bool IsHeld(const Worker& worker) const { return worker.here && worker.arrived > worker.applied; }
  // Quorum: its last push is of the present round; it computes, so the round may get one of it.
  bool IsIn(const Worker& worker) const { return IsHeld(worker) && worker.arrived > worker.late; }
  bool Computes(const Worker& worker) const {
    return worker.here && worker.running && !worker.paused && !worker.leaves && !IsIn(worker);
  }
  bool MayAnswer(const Pull& pull) const;
  std::optional<Step> NextRound();
  std::optional<Step> NextUpdate();
  bool MayApply(size_t worker) const;
  bool IsAwaited(const Worker& worker) const {
    return worker.here && (IsHeld(worker) || (worker.running && !worker.paused));
  }
  Step Apply(size_t worker);
  uint64_t Deadline() const;

  const StoreMode mode_;
  uint64_t version_ = 0;
  bool is_grace_over_ = false;
  std::vector<Worker> workers_;
  std::deque<Step::Push> arrivals_;  // async: that are not applied
  std::deque<Pull> pulls_;
};

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_STORE_LEDGER_H_
