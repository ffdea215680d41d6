#include "schedule/engine/tensors.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "schedule/collective/partition.h"
#include "schedule/engine/ending.h"
#include "schedule/engine/executor.h"
#include "schedule/hash.h"

namespace thinwire {
namespace {

std::vector<Segment> SegmentsOf(const BucketRequest& request) {
  if (!request.segments.empty()) return {request.segments.begin(), request.segments.end()};
  return {{.name = std::string(request.key),
           .offset = 0,
           .count = request.numel,
           .total = request.numel}};
}

// The algorithm of a bucket that is exchanged at once; null if it goes in chunks.
const Algorithm* DirectAlgorithmOf(const BucketRequest& request, std::span<const Segment> segments,
                                   int world, const Options& options) {
  if (request.collective != Collective::kAllReduce) return nullptr;
  return DirectExchangeOf(segments, request.dtype, world, options).algorithm;
}

Partition PartitionOf(const BucketRequest& request, std::span<const Segment> segments, int world,
                      const Options& options) {
  if (world == 1) return MakeWhole(Local(), segments, world);
  if (const Algorithm* const direct = DirectAlgorithmOf(request, segments, world, options)) {
    return MakeWhole(*direct, segments, world);
  }
  switch (request.collective) {
    case Collective::kReduceScatter: return MakeReduceScatter(segments, world, options);
    case Collective::kAllGather: return MakeAllGather(segments, world, options);
    case Collective::kAllToAll: return MakeAllToAll(segments, world, options);
    case Collective::kAllReduce: break;
  }
  return MakePartition(segments, world, options);
}

Route RouteOf(const BucketRequest& request, std::span<const Segment> segments, int world,
              Matching matching, const Options& options) {
  if (world == 1) return Route::kLocal;
  const bool direct = DirectAlgorithmOf(request, segments, world, options) != nullptr;
  return direct && matching == Matching::kByTag ? Route::kDirect : Route::kOrdered;
}

// The mean divides by this.
float DivisorOf(const BucketRequest& request, int world) {
  const bool mean = request.op == Op::kMean && Reduces(request.collective);
  return mean ? static_cast<float>(world) : 1.0f;
}

uint64_t WithShape(uint64_t hash, std::string_view shape) {
  return shape.empty() ? hash : HashCombine(hash, HashBytes(shape));
}

bool UseFeedback(std::span<const Segment> segments, const Options& options) {
  return std::any_of(segments.begin(), segments.end(), [&](const Segment& segment) {
    return options.codecs[segment.codec].uses_feedback();
  });
}

// InvalidArgument if the stream is being captured: the call would not run now, and its replays
// would exchange nothing. `what` names the tensor.
absl::Status CheckNotCaptured(DeviceStream& stream, const std::string& what) {
  if (!stream.IsCapturing()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      what, ": its stream is being captured into a CUDA graph, expected one that runs; ",
      "a graph can't hold an exchange with other ranks: end the capture before the "
      "allreduce, and capture the rest"));
}

// True if any chunk uses ChunkJob::carried.
bool Carries(const Partition& partition) {
  return std::any_of(partition.chunks.begin(), partition.chunks.end(),
                     [](const Chunk& chunk) { return chunk.algorithm->carries; });
}

}  // namespace

Bucket::Bucket(const BucketRequest& request, const Membership& members, Matching matching,
               const Options& options)
    : key_(request.key),
      collective_(request.collective),
      output_numel_(OutputNumel(collective_, request.numel, members.size)),
      segments_(SegmentsOf(request)),
      whole_(request.segments.empty()),
      shape_(request.shape),
      partition_(PartitionOf(request, segments_, members.size, options)),
      route_(RouteOf(request, segments_, members.size, matching, options)),
      scale_(1.0f / DivisorOf(request, members.size)) {
  const bool momentum = options.momentum.beta != 0.0f;
  needs_memory_ = momentum || (partition_.keeps_residuals() && UseFeedback(segments_, options));
  layout_ = {.segments = partition_.segments,
             .owned = partition_.SecondHopOf(members.rank),
             .second_hop_weight = DivisorOf(request, members.size),
             .arrays = momentum ? std::vector{std::string(kMomentum)} : std::vector<std::string>(),
             .carried = Carries(partition_) ? partition_.chunks.size() : 0};
  SetName(key_, shape_, &report_);
  report_.key = HashBytes(key_);
  report_.numel = request.numel;
  report_.partition_hash = WithShape(partition_.Hash(), shape_);
  report_.priority = request.priority;
  report_.dtype = static_cast<uint8_t>(request.dtype);
  report_.op = static_cast<uint8_t>(request.op);
  report_.collective = static_cast<uint8_t>(request.collective);
  report_.direct = route_ == Route::kDirect ? 1 : 0;
  report_.chunks = static_cast<uint32_t>(partition_.chunks.size());
  agreed_ = report_.partition_hash;
  for (const uint64_t part : {report_.numel, uint64_t{report_.dtype}, uint64_t{report_.op},
                              uint64_t{report_.collective}}) {
    agreed_ = HashCombine(agreed_, part);
  }
}

bool Bucket::Matches(const BucketRequest& request) const {
  if (request.numel != report_.numel || static_cast<uint8_t>(request.dtype) != report_.dtype ||
      static_cast<uint8_t>(request.op) != report_.op || request.collective != collective_ ||
      request.shape != shape_ || request.priority != report_.priority || request.key != key_) {
    return false;
  }
  return whole_ ? request.segments.empty()
                : std::equal(segments_.begin(), segments_.end(), request.segments.begin(),
                             request.segments.end());
}

ChunkJob Bucket::JobOf(uint32_t number, uint64_t step, const BucketMemory* kept,
                       const Options& options) const {
  const Chunk& chunk = partition_.chunks[number];
  CodecPair codec = options.codecs[chunk.codec];
  codec.up = codec.up.AtStep(step);
  const bool feedback = codec.uses_feedback() && chunk.algorithm->keeps_residuals;
  ChunkJob job;
  job.codec = codec;
  job.chunk = &chunk;
  job.momentum = options.momentum;
  job.scale = scale_;
  job.tensor = report_.key;
  job.step = step;
  if (kept == nullptr) return job;
  if (feedback) job.residual = kept->residual.get();
  job.momentum.velocity = kept->array(0);
  job.undo = kept->undo.get();
  if (kept->carried != nullptr) job.carried = kept->carried.get() + number;
  return job;
}

void Bucket::Rehearse(const Options& options, const Membership& members, const Device& device) {
  // A rehearsal checks only which pointers are null, and whether blocks lie in scratch.
  auto* const somewhere = reinterpret_cast<float*>(uintptr_t{1} << 20);
  const auto floats_if = [&](bool kept) {
    return std::shared_ptr<float[]>(std::shared_ptr<void>(), kept ? somewhere : nullptr);
  };
  const BucketMemory kept{.residual = floats_if(needs_memory()),
                          .arrays = {floats_if(!layout_.arrays.empty())},
                          .carried = floats_if(needs_memory() && layout_.carried > 0),
                          .fence = nullptr,
                          .undo = nullptr};
  const std::vector<Range> all = {{0, report_.numel}};
  const bool may_be_absent = collective_ == Collective::kAllReduce;
  for (uint32_t number = 0; number < report_.chunks; ++number) {
    ChunkJob job =
        JobOf(number, 0, &kept, options);  // of the first step, when a warm-up sends most
    job.input = {somewhere, report_.numel, static_cast<DType>(report_.dtype)};
    job.output = job.input;
    job.output.numel = output_numel_;
    chunk_memory_ = ChunkMemory::Most(chunk_memory_, MemoryOf(job, members, device));
    if (!may_be_absent) continue;
    job.absent = all;
    chunk_memory_ = ChunkMemory::Most(chunk_memory_, MemoryOf(job, members, device));
  }
}

uint64_t Bucket::TagOf(uint64_t id, uint32_t chunk) const {
  return HashCombine(HashCombine(id, chunk), agreed_);
}

void Bucket::RangesOf(std::span<const uint32_t> segments, std::vector<Range>* ranges) const {
  ranges->clear();
  if (segments.empty() || !partition_.keeps_residuals()) return;
  *ranges = thinwire::RangesOf(segments, segments_);
}

ChunkJob Use::JobOf(uint32_t chunk, const Options& options) const {
  ChunkJob job = bucket->JobOf(chunk, step, memory.get(), options);
  job.tag = bucket->TagOf(id(), chunk);
  job.input = input;
  job.output = output;
  job.absent = absent;
  if (divisor != 0.0f) {
    job.scale = 1.0f / divisor;
    // With different divisors, ranks' exchanges never match, as in Bucket::TagOf.
    job.tag = HashCombine(job.tag, std::bit_cast<uint32_t>(divisor));
  }
  return job;
}

void Use::Renew() {
  helper = nullptr;
  const absl::MutexLock lock(&mu_);
  chunks_left_ = bucket->partition().chunks.size();
  chunks_running_ = 0;
  done_ = false;
  status_ = absl::OkStatus();
}

bool Use::BeginChunk() {
  const absl::MutexLock lock(&mu_);
  if (closed_) return false;
  ++chunks_running_;
  return true;
}

Use::Left Use::EndChunk(bool ok) {
  const absl::MutexLock lock(&mu_);
  --chunks_running_;
  if (ok && --chunks_left_ == 0) return Left::kDone;
  return closed_ && chunks_running_ == 0 ? Left::kFailed : Left::kSome;
}

bool Use::Close() {
  const absl::MutexLock lock(&mu_);
  closed_ = true;
  return chunks_running_ == 0 && chunks_left_ > 0;
}

void Use::Complete(absl::Status status) {
  const absl::MutexLock lock(&mu_);
  done_ = true;
  status_ = std::move(status);
}

absl::Status Use::WaitOn(void* later) {
  if (helper != nullptr && !done()) helper->Help(shared_from_this());
  std::shared_ptr<Fence> work;
  {
    const absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(&done_));
    if (!status_.ok() || fence == nullptr) return status_;
    work = fence;
  }
  const std::unique_ptr<DeviceStream> caller = device->Adopt(later);
  if (absl::Status status = CheckNotCaptured(*caller, absl::StrCat("tensor '", label, "'"));
      !status.ok()) {
    return status;
  }
  work->HoldBack(*caller);
  return caller->status();
}

bool Use::done() const {
  const absl::MutexLock lock(&mu_);
  return done_;
}

std::string Use::Describe(Deadline now) const {
  const std::chrono::duration<double> since = now - submitted;
  const absl::MutexLock lock(&mu_);
  return absl::StrCat("tensor '", label, "' call ", report.call, ", ", report.numel,
                      " elements, in flight for ", since.count(), " s: ", chunks_left_, " of ",
                      report.chunks, " chunks left, ", chunks_running_, " running\n");
}

Tensors::Tensors(const Options& options, const Membership& members, Matching matching,
                 std::shared_ptr<Device> device, size_t fence_slots)
    : options_(options),
      members_(members),
      matching_(matching),
      device_(std::move(device)),
      fence_slots_(fence_slots),
      feedback_(device_, fence_slots, options.recoverable && members.size > 1) {}

Tensors::Registered Tensors::Register(const BucketRequest& request) {
  const uint64_t key = HashBytes(request.key);
  {
    const absl::MutexLock lock(&mu_);
    const Name& name = names_.try_emplace(key, Name{.step = first_step_}).first->second;
    if (name.bucket != nullptr && name.bucket->Matches(request)) return {name.bucket, false};
  }
  const auto bucket = std::make_shared<Bucket>(request, members_, matching_, options_);
  if (device_ != nullptr) bucket->Rehearse(options_, members_, *device_);
  const absl::MutexLock lock(&mu_);
  NameOf(*bucket).bucket = bucket;
  return {bucket, true};
}

absl::StatusOr<UsePtr> Tensors::Begin(const std::shared_ptr<const Bucket>& bucket,
                                      const Submission& submission) {
  const UsePtr use = Claim(bucket);
  if (use == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", members_.rank, ", tensor '", bucket->key(),
                     "' is already being reduced; wait for that call first, or use another name"));
  }
  absl::Status status = Prepare(submission, *use);
  if (status.ok() && bucket->needs_memory()) status = Bind(*use);
  if (status.ok() && device_ != nullptr && use->fence == nullptr) {
    use->fence = std::make_shared<Fence>(fence_slots_);
  }
  if (status.ok()) status = Commit(use);
  if (status.ok()) return use;
  use->memory.reset();
  const absl::MutexLock lock(&mu_);
  NameOf(*bucket).claimed = false;
  return status;
}

// A use of the bucket that nobody else sees; null if the name is in flight already.
UsePtr Tensors::Claim(const std::shared_ptr<const Bucket>& bucket) {
  UsePtr use;
  {
    const absl::MutexLock lock(&mu_);
    Name& name = NameOf(*bucket);
    if (!bucket->named()) {
      use = std::make_shared<Use>();
    } else if (std::exchange(name.claimed, true)) {
      return nullptr;
    } else if (name.last != nullptr && name.last.use_count() == 1) {
      use = name.last;
    } else {  // the caller still holds the last one
      use = std::make_shared<Use>();
      if (name.last != nullptr) {
        use->bucket = name.last->bucket;
        use->bound = name.last->bound;
      }
      name.last = use;
    }
  }
  if (use->bucket != bucket) use->bound.reset();
  use->bucket = bucket;
  use->label = bucket->key();
  use->Renew();
  return use;
}

absl::Status Tensors::Prepare(const Submission& submission, Use& use) {
  use.input = submission.input;
  use.output = submission.output;
  use.divisor = submission.divisor;
  use.device = device_;
  use.stream = submission.stream;
  use.ready = nullptr;
  use.fence = nullptr;
  use.submitted = Clock::now();
  use.deadline = use.submitted + options_.timeout;
  use.bucket->RangesOf(submission.absent, &use.absent);
  if (device_ == nullptr) return absl::OkStatus();
  const std::unique_ptr<DeviceStream> caller = device_->Adopt(submission.stream);
  absl::Status status = CheckNotCaptured(
      *caller, absl::StrCat("rank ", members_.rank, ", tensor '", use.bucket->key(), "'"));
  if (!status.ok()) return status;
  use.ready = caller->Record();
  if (caller->status().ok()) return absl::OkStatus();
  return OfTensor(members_.rank, use.bucket->key(), caller->status());
}

// Finds residuals that have not moved without a look-up.
absl::Status Tensors::Bind(Use& use) {
  {
    const absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(&feedback_is_free_));
    feedback_is_free_ = false;
  }
  absl::StatusOr<std::shared_ptr<const BucketMemory>> memory = use.bound.lock();
  if (*memory == nullptr) memory = feedback_.Bind(use.bucket->key(), use.bucket->layout());
  {
    const absl::MutexLock lock(&mu_);
    feedback_is_free_ = true;
  }
  if (absl::IsFailedPrecondition(memory.status())) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", members_.rank, ", tensor '", use.bucket->key(),
                     "' has elements of a parameter that another tensor in flight has as well; ",
                     "wait for that one first"));
  }
  if (!memory.ok()) return OfTensor(members_.rank, use.bucket->key(), memory.status());
  use.memory = *std::move(memory);
  use.bound = use.memory;
  use.fence = use.memory->fence;
  return absl::OkStatus();
}

absl::Status Tensors::Commit(const UsePtr& use) {
  const absl::MutexLock lock(&mu_);
  if (!closed_.ok()) return closed_;
  if (use->memory != nullptr && use->memory->undo != nullptr) use->memory->undo->Begin();
  Number(*use);
  in_flight_.Insert(use->id()) = use;
  return absl::OkStatus();
}

// Numbers the use: its call and its step. Ranks match uses by call.
void Tensors::Number(Use& use) {
  Name& name = NameOf(*use.bucket);
  use.report = use.bucket->report();
  use.report.call = name.calls++;
  use.step = name.step++;
  if (use.divisor != 0.0f) {
    use.report.op = kDividedByCaller;
    use.report.partition_hash =
        HashCombine(use.report.partition_hash, std::bit_cast<uint32_t>(use.divisor));
  }
  if (use.bucket->named()) return;
  use.label = absl::StrCat("unnamed call ", use.report.call);
  SetName(use.label, use.bucket->shape(), &use.report);
}

void Tensors::Remove(Use& use) {
  use.memory.reset();
  const absl::MutexLock lock(&mu_);
  if (UsePtr* const found = in_flight_.Find(use.id()); found != nullptr) found->reset();
  in_flight_.Erase(use.id());
  NameOf(*use.bucket).claimed = false;
}

std::vector<UsePtr> Tensors::Close(const absl::Status& reason) {
  const absl::MutexLock lock(&mu_);
  closed_ = reason;
  std::vector<UsePtr> untouched;
  in_flight_.ForEach([&](uint64_t, const UsePtr& use) {
    if (use->Close()) untouched.push_back(use);
  });
  return untouched;
}

bool Tensors::idle() const {
  const absl::MutexLock lock(&mu_);
  return in_flight_.empty();
}

void Tensors::SetStep(uint64_t step) {
  const absl::MutexLock lock(&mu_);
  first_step_ = step;
  for (auto& [key, name] : names_) name.step = step;
}

std::string Tensors::Describe() const {
  const absl::MutexLock lock(&mu_);
  std::string text;
  const Deadline now = Clock::now();
  in_flight_.ForEach(
      [&](uint64_t, const UsePtr& use) { absl::StrAppend(&text, use->Describe(now)); });
  return text;
}

}  // namespace thinwire
