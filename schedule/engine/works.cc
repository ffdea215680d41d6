#include "schedule/engine/works.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "schedule/engine/checks.h"
#include "schedule/hash.h"

namespace thinwire {

Works::Works(const Options& options, const Membership& members, Matching matching,
             std::shared_ptr<Device> device, size_t fence_slots)
    : options_(options),
      members_(members),
      matching_(matching),
      device_(std::move(device)),
      fence_slots_(fence_slots),
      binder_(device_, fence_slots, options.recoverable && members.size > 1) {}

Works::Registered Works::Register(const BucketRequest& request) {
  const uint64_t key = HashBytes(request.key);
  {
    const absl::MutexLock lock(&mu_);
    const auto found = names_.find(key);
    if (found != names_.end() && found->second.bucket != nullptr &&
        found->second.bucket->Matches(request)) {
      return {found->second.bucket, false};
    }
  }
  const auto bucket = std::make_shared<Bucket>(request, members_, matching_, options_);
  if (device_ != nullptr) bucket->SetNeeds(NeedsOf(bucket, options_, members_, *device_));
  const absl::MutexLock lock(&mu_);
  NameOf(*bucket).bucket = bucket;
  return {bucket, true};
}

Works::Name& Works::NameOf(const Bucket& bucket) {
  const auto [found, fresh] = names_.try_emplace(bucket.report().key);
  if (fresh) found->second.step = first_step_;
  return found->second;
}

absl::StatusOr<WorkPtr> Works::Begin(const std::shared_ptr<const Bucket>& bucket,
                                     const Submission& submission) {
  const absl::StatusOr<Name*> name = Claim(*bucket);
  if (!name.ok()) return name.status();
  const WorkPtr work = NewWork(bucket, *name);
  absl::Status status = Fill(submission, work.get());
  if (status.ok() && bucket->needs_memory()) status = Bind(bucket, *name, work.get());
  if (status.ok() && device_ != nullptr && work->order.fence == nullptr) {
    work->order.fence = std::make_shared<Fence>(fence_slots_);
  }
  if (status.ok()) status = Commit(*name, work);
  if (status.ok()) return work;
  work->memory = {};
  if (bucket->named()) Unclaim(*name);
  return status;
}

// A named bucket has one use in flight at a time, and whoever claims it has the name's memory.
absl::StatusOr<Works::Name*> Works::Claim(const Bucket& bucket) {
  const absl::MutexLock lock(&mu_);
  Name& name = NameOf(bucket);
  if (!bucket.named()) return &name;
  if (name.in_flight) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", members_.rank, ", tensor '", bucket.key(),
                     "' is already being reduced; wait for that call first, or use another name"));
  }
  name.in_flight = true;
  return &name;
}

void Works::Unclaim(Name* name) {
  const absl::MutexLock lock(&mu_);
  name->in_flight = false;
}

WorkPtr Works::NewWork(const std::shared_ptr<const Bucket>& bucket, Name* name) {
  WorkPtr work;
  if (bucket->named() && name->spare.use_count() == 1) {
    work = name->spare;
    work->Renew();
  } else {
    work = std::make_shared<InFlight>();
    if (bucket->named()) name->spare = work;
  }
  if (work->bucket != bucket) {
    work->bucket = bucket;
    work->label = bucket->key();
  }
  return work;
}

absl::Status Works::Fill(const Submission& submission, InFlight* work) const {
  work->input = submission.input;
  work->output = submission.output;
  work->device = device_;
  work->stream = submission.stream;
  work->order = {};
  work->submitted = Clock::now();
  work->deadline = work->submitted + options_.timeout;
  work->chunks_left = work->bucket->partition().chunks.size();
  work->chunks_running = 0;
  work->digest = 0;
  work->bucket->RangesOf(submission.absent, &work->absent);
  if (device_ == nullptr) return absl::OkStatus();
  const std::unique_ptr<DeviceStream> caller = device_->Adopt(submission.stream);
  absl::Status status = CheckNotCaptured(
      *caller, absl::StrCat("rank ", members_.rank, ", tensor '", work->bucket->key(), "'"));
  if (!status.ok()) return status;
  work->order.ready = caller->Record();
  return caller->status();
}

absl::Status Works::Bind(const std::shared_ptr<const Bucket>& bucket, Name* name, InFlight* work) {
  if (name->bound_bucket != bucket) {
    name->bound_bucket = bucket;
    name->bound = {};
  }
  absl::StatusOr<BucketMemory> memory = binder_.Bind(*bucket, &name->bound);
  if (absl::IsFailedPrecondition(memory.status())) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", members_.rank, ", tensor '", bucket->key(),
                     "' has elements of a parameter that another tensor in flight has as well; ",
                     "wait for that one first"));
  }
  if (!memory.ok()) {
    return absl::Status(memory.status().code(),
                        absl::StrCat("rank ", members_.rank, ", tensor '", bucket->key(),
                                     "': ", std::string(memory.status().message())));
  }
  work->memory = *std::move(memory);
  work->order.fence = work->memory.fence;
  return absl::OkStatus();
}

absl::Status Works::Commit(Name* name, const WorkPtr& work) {
  const absl::MutexLock lock(&mu_);
  if (!closed_.ok()) return closed_;
  if (work->memory.undo != nullptr) work->memory.undo->Begin();
  work->report = work->bucket->report();
  work->report.call = name->calls++;
  work->step = name->step++;
  if (!work->bucket->named()) {
    work->label = absl::StrCat("unnamed call ", work->report.call);
    SetName(work->label, work->bucket->shape(), &work->report);
  }
  works_.Insert(work->id()) = work;
  return absl::OkStatus();
}

WorkPtr Works::BeginChunk(uint64_t id) {
  const absl::MutexLock lock(&mu_);
  WorkPtr* const work = works_.Find(id);
  if (work == nullptr || !closed_.ok()) return nullptr;
  ++(*work)->chunks_running;
  return *work;
}

Works::Left Works::EndChunk(InFlight& work, bool ok) {
  const absl::MutexLock lock(&mu_);
  --work.chunks_running;
  if (ok && --work.chunks_left == 0) return Left::kDone;
  return !closed_.ok() && work.chunks_running == 0 ? Left::kFailed : Left::kSome;
}

bool Works::Remove(const WorkPtr& work) {
  const absl::MutexLock lock(&mu_);
  WorkPtr* const found = works_.Find(work->id());
  if (found == nullptr || *found != work) return false;
  found->reset();
  works_.Erase(work->id());
  work->memory = {};
  names_.at(work->report.key).in_flight = false;
  return true;
}

std::vector<WorkPtr> Works::Close(const absl::Status& reason) {
  const absl::MutexLock lock(&mu_);
  closed_ = reason;
  std::vector<WorkPtr> untouched;
  for (const auto& [id, work] : works_) {
    if (work->chunks_running == 0) untouched.push_back(work);
  }
  return untouched;
}

bool Works::idle() const {
  const absl::MutexLock lock(&mu_);
  return works_.empty();
}

void Works::SetStep(uint64_t step) {
  const absl::MutexLock lock(&mu_);
  first_step_ = step;
  for (auto& [key, name] : names_) name.step = step;
}

std::string Works::Describe() const {
  const absl::MutexLock lock(&mu_);
  std::string text;
  const Deadline now = Clock::now();
  for (const auto& [id, work] : works_) {
    const std::chrono::duration<double> since = now - work->submitted;
    absl::StrAppend(&text, "tensor '", work->label, "' call ", work->report.call, ", ",
                    work->report.numel, " elements, in flight for ", since.count(),
                    " s: ", work->chunks_left, " of ", work->report.chunks, " chunks left, ",
                    work->chunks_running, " running\n");
  }
  return text;
}

}  // namespace thinwire
