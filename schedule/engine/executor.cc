#include "schedule/engine/executor.h"

#include <utility>

#include "schedule/engine/ending.h"
#include "transport/threads.h"

namespace thinwire {

absl::StatusOr<std::unique_ptr<Lane>> Lane::Make(Workspaces& spaces, int slot,
                                                 const Options& options, Records& records,
                                                 const HopListener* on_hop) {
  std::unique_ptr<Lane> lane(new Lane(spaces, slot, options, records, on_hop));
  if (spaces.device() == nullptr) return lane;
  absl::StatusOr<std::unique_ptr<DeviceStream>> stream = spaces.device()->MakeStream();
  if (!stream.ok()) return stream.status();
  lane->stream_ = *std::move(stream);
  absl::StatusOr<std::unique_ptr<DataPlane>> plane = spaces.PlaneOn(*lane->stream_);
  if (!plane.ok()) return plane.status();
  lane->of_stream_ = *std::move(plane);
  return lane;
}

Lane::Lane(const Lane& beside, int row)
    : spaces_(beside.spaces_),
      slot_(beside.slot_),
      row_(row),
      options_(beside.options_),
      records_(beside.records_),
      on_hop_(beside.on_hop_),
      stream_(beside.stream_),
      of_stream_(beside.of_stream_) {}

// The stream waits for the tensor, and for earlier users of its memory (fence) and the workspace.
bool Lane::Begin() {
  Use& use = UseOf(start);
  if (!use.BeginChunk()) return false;
  hop_ = nullptr;
  hops_ = 0;
  flushing_ = false;
  last_ = use.submitted;
  records_.Event(FlightEvent::kStarted, use.label, start.chunk, 0, start.predicted ? 1 : 0);
  EndStage(Stage::kQueue);
  if (stream_ != nullptr) {
    stream_->WaitFor(use.ready);
    use.fence->HoldBack(*stream_);
  }
  space_ = spaces_.Take(use.bucket->chunk_memory(), stream_.get());
  const ChunkJob job = use.JobOf(start.chunk, options_);
  run_ = job.chunk->algorithm->begin(job, *space_);
  Expect(run_->first());
  return true;
}

void Lane::EndStage(Stage stage) {
  const Clock::time_point now = Clock::now();
  records_.AddStage(stage, use().label, start.chunk, row_, last_, now);
  last_ = now;
}

void Lane::Expect(const Reception& reception) {
  if (!reception.recv.empty()) {
    expected_ = plane().Expect(reception.tag, reception.recv);
  }
}

bool Lane::Advance() {
  if (flushing_) return false;
  const absl::StatusOr<const Hop*> hop = run_->Advance();
  status = hop.status();
  if (!hop.ok()) return false;
  hop_ = *hop;
  EndStage(hop_ == nullptr ? Stage::kDecode : hop_->made_in);
  if (hop_ == nullptr) {
    flushing_ = true;
    StreamPlane* const streams = plane().of_streams();
    if (streams != nullptr) exchange = streams->Flush();
    return exchange != nullptr;
  }
  records_.Event(FlightEvent::kHopBegun, use().label, start.chunk, 0, ++hops_);
  exchange = std::move(expected_);
  if (exchange != nullptr) {
    exchange->Send(hop_->send);
  } else {
    exchange = plane().Start(hop_->tag, hop_->send, hop_->recv);
  }
  Expect(hop_->next);
  return true;
}

void Lane::OnHopEnded() {
  exchange.reset();  // it may hold memory that the next exchange needs
  // With a plane that flushes, the host only queues the stages; they run during the flush.
  EndStage(flushing_ ? Stage::kExchange : hop_->stage);
  if (flushing_) return;
  records_.Event(FlightEvent::kHopEnded, use().label, start.chunk, 0, hops_);
  if (status.ok() && ordered() && start.position != 0) (*on_hop_)(start);
}

// The engine's watchdog ends an exchange long before the plane's own deadline would.
void Lane::WaitForAll() {
  while (exchange != nullptr) {
    status = exchange->Wait(use().deadline + options_.timeout);
    OnHopEnded();
    if (status.ok()) Advance();
  }
}

absl::Status Lane::Finish() {
  // The chunk failed half-way, and the next hop would still write into its memory.
  if (expected_ != nullptr) {
    plane().Abort(OfTensor(plane().rank(), use().label, status));
    // Ends it in order: if it were dropped, that could become the plane's first failure while
    // another thread is still passing this reason to the plane.
    expected_->Send(std::vector<Bytes>(static_cast<size_t>(plane().size())));
    expected_->Wait(Deadline::max()).IgnoreError();
    expected_.reset();
  }
  run_.reset();
  std::shared_ptr<DeviceEvent> end;
  if (stream_ != nullptr) {
    end = stream_->Record();
    status = AwaitStream(end);
  }
  spaces_.Give(std::move(space_), std::move(end));
  records_.Event(FlightEvent::kChunkDone, use().label, start.chunk);
  return std::move(status);
}

// If the chunk succeeded, its queued work goes on; if it failed, the work must end here.
absl::Status Lane::AwaitStream(const std::shared_ptr<DeviceEvent>& end) {
  if (status.ok()) {
    use().fence->Set(slot_, end);
    status = stream_->status();
  }
  if (status.ok()) return status;
  // A stream that waits for peers ends only when its plane fails.
  if (spaces_.plane().traits().memory == Memory::kStream) spaces_.plane().Abort(status);
  stream_->Synchronize(Clock::now() + spaces_.patience()).IgnoreError();
  return status;
}

void IssueOrder::Add(const void* chunk, int hops, bool drain) {
  hops_.push_back(chunk);
  FlushPrevious();
  previous_ = chunk;
  later_hops_ = hops - 1;
  if (drain) FlushPrevious();
}

// The previous chunk's later hops come next, whether its first hop has been issued or not.
void IssueOrder::FlushPrevious() {
  if (previous_ != nullptr) hops_.insert(hops_.end(), later_hops_, previous_);
  previous_ = nullptr;
}

void IssueOrder::Remove(const void* chunk) {
  if (previous_ == chunk) previous_ = nullptr;
  std::erase(hops_, chunk);
}

Executor::Executor(Workspaces& spaces, Workspaces& direct_spaces, const Options& options,
                   Records& records, HopListener on_hop, ChunkListener on_end)
    : spaces_(spaces),
      direct_spaces_(direct_spaces),
      traits_(spaces.plane().traits()),
      options_(options),
      records_(records),
      on_hop_(std::move(on_hop)),
      on_end_(std::move(on_end)) {}

Executor::~Executor() {
  Close();
  std::vector<std::thread> threads;
  {
    const absl::MutexLock lock(&mu_);
    for (const auto& worker : workers_) threads.push_back(std::move(worker->thread));
    for (DirectQueue* queue : {&to_post_, &to_finish_}) {
      if (queue->thread.joinable()) threads.push_back(std::move(queue->thread));
    }
  }
  for (std::thread& thread : threads) thread.join();
}

absl::Status Executor::Begin() {
  for (int lane = 0; lane < options_.lanes; ++lane) {
    if (absl::Status status = AddLane(); !status.ok()) return status;
  }
  if (traits_.matching == Matching::kByTag) {  // otherwise small tensors go in order as well
    absl::StatusOr<std::unique_ptr<Lane>> lane =
        Lane::Make(direct_spaces_, options_.lanes, options_, records_, nullptr);
    if (!lane.ok()) return lane.status();
    const absl::MutexLock lock(&mu_);
    free_direct_.push_back(direct_lanes_.emplace_back(*std::move(lane)).get());
  }
  const absl::MutexLock lock(&mu_);
  return traits_.completion == Completion::kEvents ? AddWorker() : absl::OkStatus();
}

// Slots in fences: those of announced chunks come first, then that of small tensors, then those of
// predicted chunks.
absl::Status Executor::AddLane() {
  int number;
  {
    const absl::MutexLock lock(&mu_);
    number = static_cast<int>(lanes_.size());
  }
  const int slot = number < options_.lanes ? number : number + 1;
  absl::StatusOr<std::unique_ptr<Lane>> lane =
      Lane::Make(spaces_, slot, options_, records_, &on_hop_);
  if (!lane.ok()) return lane.status();
  const absl::MutexLock lock(&mu_);
  if (traits_.completion == Completion::kBlocking) {
    if (absl::Status status = AddWorker(); !status.ok()) return status;
  }
  free_.push_back(lanes_.emplace_back(*std::move(lane)).get());
  return absl::OkStatus();
}

absl::Status Executor::AddWorker() {
  auto worker = std::make_unique<Worker>();
  absl::StatusOr<std::thread> thread = StartThread([this, w = worker.get()] { Run(*w); });
  if (!thread.ok()) return thread.status();
  worker->thread = *std::move(thread);
  workers_.push_back(std::move(worker));
  return absl::OkStatus();
}

void Executor::Start(const StartChunk& start) {
  while (!Admit(start)) {
    if (absl::Status status = AddLane(); !status.ok()) {
      if (UseOf(start).BeginChunk()) on_end_(start, std::move(status));
      return;
    }
  }
}

// False if there is no free lane.
bool Executor::Admit(const StartChunk& start) {
  const absl::MutexLock lock(&mu_);
  if (closed_) return true;
  if (free_.empty()) return false;
  Lane* const lane = free_.back();
  free_.pop_back();
  lane->start = start;
  lane->status = absl::OkStatus();
  if (traits_.matching == Matching::kByOrder) {
    const Chunk& chunk = UseOf(start).bucket->partition().chunks[start.chunk];
    lane->hops_left = chunk.algorithm->hops;
    order_.Add(lane, lane->hops_left, start.drain);
  }
  MakeReady(lane);
  return true;
}

// True if the order of hops lets the lane go on. A lane with no hops left only has to be finished.
bool Executor::IsDue(const Lane& lane) const {
  if (traits_.matching == Matching::kByTag || closed_) return true;
  return lane.hops_left == 0 || order_.IsNext(&lane);
}

// Null if no lane that is ready is due.
Lane* Executor::TakeDue() {
  for (auto at = ready_.begin(); at != ready_.end(); ++at) {
    Lane* const lane = *at;
    if (!IsDue(*lane)) continue;
    ready_.erase(at);
    if (closed_) lane->status.Update(absl::CancelledError("the group has failed"));
    return lane;
  }
  return nullptr;
}

void Executor::MakeReady(Lane* lane) {
  ready_.push_back(lane);
  HandOut();
}

void Executor::HandOut() {
  while (!idle_.empty()) {
    Lane* const lane = TakeDue();
    if (lane == nullptr) return;
    Worker& worker = *idle_.Pop();
    worker.lane = lane;
    worker.handed.Signal();
  }
}

void Executor::LetGoIfOver() {
  while (over() && !idle_.empty()) idle_.Pop()->handed.Signal();
}

void Executor::Close() {
  std::vector<Lane*> posted;
  {
    const absl::MutexLock lock(&mu_);
    closed_ = true;
    HandOut();
    LetGoIfOver();
    direct_.ForEach([&](uint64_t, Lane*& lane) {
      if (lane != nullptr) posted.push_back(std::exchange(lane, nullptr));
    });
    posted_.SignalAll();
    to_post_.pushed.SignalAll();
    to_finish_.pushed.SignalAll();
  }
  for (Lane* const lane : posted) FinishPosted(*lane);
}

void Executor::Run(Worker& worker) {
  while (Lane* const lane = Next(worker)) GoOn(*lane);
}

// Null once the executor is closed and no chunk is under way.
Lane* Executor::Next(Worker& worker) {
  const absl::MutexLock lock(&mu_);
  if (Lane* const lane = TakeDue(); lane != nullptr || over()) return lane;
  idle_.Push(&worker);
  while (worker.lane == nullptr && !over()) worker.handed.Wait(&mu_);
  return std::exchange(worker.lane, nullptr);
}

// Works on the chunk until it ends, or until it waits for an event, which makes it ready again.
void Executor::GoOn(Lane& lane) {
  if (lane.begun()) {
    lane.OnHopEnded();
  } else if (!lane.status.ok() || !lane.Begin()) {
    return Release(lane);  // the group has failed
  }
  if (traits_.completion == Completion::kBlocking) {
    if (lane.Advance()) lane.WaitForAll();
  } else if (lane.status.ok() && Issue(lane)) {
    return;
  }
  Finish(lane);
}

void Executor::Finish(Lane& lane) {
  absl::Status status = lane.Finish();
  const StartChunk start = std::move(lane.start);
  Release(lane);  // the chunk that follows this one may need its lane
  on_end_(start, std::move(status));
}

// Starts the lane's next exchange; false if there is none.
bool Executor::Issue(Lane& lane) {
  if (!lane.Advance()) return false;
  if (lane.hops_left > 0) {  // otherwise it is the flush, which is outside the order
    --lane.hops_left;
    const absl::MutexLock lock(&mu_);
    if (!closed_) order_.Pop();
  }
  lane.exchange->OnDone([this, &lane](absl::Status status) {
    const absl::MutexLock lock(&mu_);
    lane.status = std::move(status);
    MakeReady(&lane);
  });
  return true;
}

void Executor::Release(Lane& lane) {
  lane.start.host.reset();
  const absl::MutexLock lock(&mu_);
  if (!lane.ordered()) return free_direct_.push_back(&lane);
  if (lane.hops_left > 0) order_.Remove(&lane);  // it failed
  free_.push_back(&lane);
  LetGoIfOver();
}

void Executor::StartDirect(const UsePtr& use, bool caller_waits) {
  use->helper = this;
  if (direct_spaces_.device() == nullptr) {
    Post(use);
    if (caller_waits) return;
  }
  absl::Status status;
  {
    const absl::MutexLock lock(&mu_);
    if (closed_) return;
    if (direct_spaces_.device() == nullptr) {
      Push(to_finish_, use).IgnoreError();  // without a thread, a caller that waits finishes it
      return;
    }
    direct_.Insert(use->id()) = nullptr;
    status = Push(to_post_, use);
    if (!status.ok()) direct_.Erase(use->id());
  }
  if (!status.ok() && use->BeginChunk()) on_end_({.id = use->id(), .host = use}, status);
}

void Executor::Post(const UsePtr& use) {
  Lane& lane = FreeDirectLane();
  lane.start = {.id = use->id(), .host = use};
  if (!lane.Begin()) return Release(lane);  // the group has failed
  lane.Advance();
  {
    const absl::MutexLock lock(&mu_);
    if (!closed_) {
      direct_.Insert(use->id()) = &lane;
      return posted_.SignalAll();
    }
  }
  FinishPosted(lane);  // Close did not see it
}

// Waiting until the tensor is posted is short, since posting waits for no peer.
void Executor::Help(const UsePtr& use) {
  const uint64_t id = use->id();
  Lane* lane = nullptr;
  {
    const absl::MutexLock lock(&mu_);
    for (;;) {
      Lane* const* const found = direct_.Find(id);
      if (closed_ || found == nullptr || *found != nullptr) break;
      posted_.Wait(&mu_);
    }
    lane = TakePosted(id);
  }
  if (lane != nullptr) FinishPosted(*lane);
}

void Executor::FinishPosted(Lane& lane) {
  lane.WaitForAll();
  Finish(lane);
}

Lane& Executor::FreeDirectLane() {
  const absl::MutexLock lock(&mu_);
  if (free_direct_.empty()) {
    // All but the first have rows after those of other lanes.
    const size_t row = options_.lanes + options_.predicted_lanes + direct_lanes_.size();
    return *direct_lanes_.emplace_back(
        std::make_unique<Lane>(*direct_lanes_.front(), static_cast<int>(row)));
  }
  Lane& lane = *free_direct_.back();
  free_direct_.pop_back();
  return lane;
}

// Takes the tensor's lane to finish it; null if it is taken, or its exchange has not begun.
Lane* Executor::TakePosted(uint64_t id) {
  Lane** const found = direct_.Find(id);
  if (found == nullptr || *found == nullptr) return nullptr;
  Lane* const lane = *found;
  direct_.Erase(id);
  return lane;
}

void Executor::PostQueued(const UsePtr& use) {
  Post(use);
  const absl::MutexLock lock(&mu_);
  Push(to_finish_, use).IgnoreError();  // without a thread, a caller that waits finishes it
}

void Executor::FinishQueued(const UsePtr& use) {
  Lane* lane = nullptr;
  {
    const absl::MutexLock lock(&mu_);
    lane = TakePosted(use->id());
  }
  if (lane != nullptr) FinishPosted(*lane);
}

// Starts the queue's thread if there is none; if that fails, the use stays in the queue.
absl::Status Executor::Push(DirectQueue& queue, const UsePtr& use) {
  if (closed_) return absl::OkStatus();
  queue.uses.Push(use);
  queue.pushed.Signal();
  if (queue.thread.joinable()) return absl::OkStatus();
  absl::StatusOr<std::thread> thread = StartThread([this, &queue] {
    while (const UsePtr next = PopFrom(queue)) (this->*queue.work)(next);
  });
  if (thread.ok()) queue.thread = *std::move(thread);
  return thread.status();
}

// Null once the executor is closed.
UsePtr Executor::PopFrom(DirectQueue& queue) {
  const absl::MutexLock lock(&mu_);
  while (!closed_ && queue.uses.empty()) queue.pushed.Wait(&mu_);
  return closed_ ? nullptr : queue.uses.Pop();
}

}  // namespace thinwire
