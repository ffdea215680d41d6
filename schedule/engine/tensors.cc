#include "schedule/engine/tensors.h"

#include <bit>
#include <utility>

#include "absl/strings/str_cat.h"
#include "schedule/engine/checks.h"
#include "schedule/hash.h"

namespace thinwire {

std::shared_ptr<const Bucket> NamedTensor::Find(const BucketRequest& request) const {
  const absl::MutexLock lock(&mu_);
  return bucket_ != nullptr && bucket_->Matches(request) ? bucket_ : nullptr;
}

void NamedTensor::SetBucket(const std::shared_ptr<const Bucket>& bucket) {
  const absl::MutexLock lock(&mu_);
  bucket_ = bucket;
}

UsePtr NamedTensor::Claim(const std::shared_ptr<const Bucket>& bucket) {
  UsePtr use;
  {
    const absl::MutexLock lock(&mu_);
    if (!bucket->named()) {
      use = std::make_shared<Use>();
    } else if (std::exchange(claimed_, true)) {
      return nullptr;
    } else if (last_ != nullptr && last_.use_count() == 1) {
      use = last_;
    } else {  // the caller holds the last one still
      use = std::make_shared<Use>();
      if (last_ != nullptr) {
        use->bucket = last_->bucket;
        use->bound = last_->bound;
      }
      last_ = use;
    }
  }
  if (use->bucket != bucket) use->bound = {};
  use->bucket = bucket;
  use->label = bucket->key();
  use->Renew();
  return use;
}

void NamedTensor::Release() {
  const absl::MutexLock lock(&mu_);
  claimed_ = false;
}

void NamedTensor::Number(Use& use) {
  use.report = use.bucket->report();
  if (use.divisor != 0.0f) {
    use.report.op = kDividedByCaller;
    use.report.partition_hash =
        HashCombine(use.report.partition_hash, std::bit_cast<uint32_t>(use.divisor));
  }
  {
    const absl::MutexLock lock(&mu_);
    use.report.call = calls_++;
    use.step = step_++;
  }
  if (use.bucket->named()) return;
  use.label = absl::StrCat("unnamed call ", use.report.call);
  SetName(use.label, use.bucket->shape(), &use.report);
}

void NamedTensor::SetStep(uint64_t step) {
  const absl::MutexLock lock(&mu_);
  step_ = step;
}

void Turn::Enter() {
  const absl::MutexLock lock(&mu_);
  mu_.Await(absl::Condition(&free_));
  free_ = false;
}

void Turn::Exit() {
  const absl::MutexLock lock(&mu_);
  free_ = true;
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
  NamedTensor* tensor = nullptr;
  {
    const absl::MutexLock lock(&mu_);
    tensor = &names_.try_emplace(HashBytes(request.key), first_step_).first->second;
  }
  if (auto known = tensor->Find(request); known != nullptr) return {std::move(known), false};
  const auto bucket = std::make_shared<Bucket>(request, *tensor, members_, matching_, options_);
  if (device_ != nullptr) bucket->Rehearse(options_, members_, *device_);
  tensor->SetBucket(bucket);
  return {bucket, true};
}

absl::StatusOr<UsePtr> Tensors::Begin(const std::shared_ptr<const Bucket>& bucket,
                                      const Submission& submission) {
  const UsePtr use = bucket->tensor().Claim(bucket);
  if (use == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", members_.rank, ", tensor '", bucket->key(),
                     "' is already being reduced; wait for that call first, or use another name"));
  }
  absl::Status status = Prepare(submission, *use);
  if (status.ok() && bucket->needs_memory()) status = Bind(*use);
  if (status.ok() && device_ != nullptr && use->order.fence == nullptr) {
    use->order.fence = std::make_shared<Fence>(fence_slots_);
  }
  if (status.ok()) status = Commit(use);
  if (status.ok()) return use;
  use->memory = {};
  if (bucket->named()) bucket->tensor().Release();
  return status;
}

absl::Status Tensors::Prepare(const Submission& submission, Use& use) {
  use.input = submission.input;
  use.output = submission.output;
  use.divisor = submission.divisor;
  use.device = device_;
  use.stream = submission.stream;
  use.order = {};
  use.submitted = Clock::now();
  use.deadline = use.submitted + options_.timeout;
  use.bucket->RangesOf(submission.absent, &use.absent);
  if (device_ == nullptr) return absl::OkStatus();
  const std::unique_ptr<DeviceStream> caller = device_->Adopt(submission.stream);
  absl::Status status = CheckNotCaptured(
      *caller, absl::StrCat("rank ", members_.rank, ", tensor '", use.bucket->key(), "'"));
  if (!status.ok()) return status;
  use.order.ready = caller->Record();
  return caller->status();
}

absl::Status Tensors::Bind(Use& use) {
  turn_.Enter();
  absl::StatusOr<BucketMemory> memory = BindInTurn(*use.bucket, use.bound);
  turn_.Exit();
  if (absl::IsFailedPrecondition(memory.status())) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", members_.rank, ", tensor '", use.bucket->key(),
                     "' has elements of a parameter that another tensor in flight has as well; ",
                     "wait for that one first"));
  }
  if (!memory.ok()) {
    return absl::Status(memory.status().code(),
                        absl::StrCat("rank ", members_.rank, ", tensor '", use.bucket->key(),
                                     "': ", std::string(memory.status().message())));
  }
  use.memory = *std::move(memory);
  use.order.fence = use.memory.fence;
  return absl::OkStatus();
}

// A bucket whose residuals have not moved finds them by a comparison of one number.
absl::StatusOr<BucketMemory> Tensors::BindInTurn(const Bucket& bucket, BoundMemory& bound) {
  if (bound.generation == feedback_.generation()) {
    BucketMemory memory{.residual = bound.residual.lock(),
                        .arrays = {},
                        .carried = bound.carried.lock(),
                        .fence = bound.fence,
                        .undo = bound.undo};
    for (const auto& array : bound.arrays) memory.arrays.push_back(array.lock());
    return memory;
  }
  absl::StatusOr<BucketMemory> memory = feedback_.Bind(bucket.key(), bucket.layout());
  if (memory.ok()) {
    bound = {.generation = feedback_.generation(),
             .residual = memory->residual,
             .carried = memory->carried,
             .arrays = {memory->arrays.begin(), memory->arrays.end()},
             .fence = memory->fence,
             .undo = memory->undo};
  }
  return memory;
}

absl::Status Tensors::Commit(const UsePtr& use) {
  const absl::MutexLock lock(&mu_);
  if (!closed_.ok()) return closed_;
  if (use->memory.undo != nullptr) use->memory.undo->Begin();
  use->bucket->tensor().Number(*use);
  in_flight_.Insert(use->id()) = use;
  return absl::OkStatus();
}

void Tensors::Remove(Use& use) {
  use.memory = {};
  const absl::MutexLock lock(&mu_);
  if (UsePtr* const found = in_flight_.Find(use.id()); found != nullptr) found->reset();
  in_flight_.Erase(use.id());
  if (use.bucket->named()) use.bucket->tensor().Release();
}

std::vector<UsePtr> Tensors::Close(const absl::Status& reason) {
  const absl::MutexLock lock(&mu_);
  closed_ = reason;
  std::vector<UsePtr> untouched;
  for (const auto& [id, use] : in_flight_) {
    if (use->Close()) untouched.push_back(use);
  }
  return untouched;
}

bool Tensors::idle() const {
  const absl::MutexLock lock(&mu_);
  return in_flight_.empty();
}

void Tensors::SetStep(uint64_t step) {
  const absl::MutexLock lock(&mu_);
  first_step_ = step;
  for (auto& [key, tensor] : names_) tensor.SetStep(step);
}

std::string Tensors::Describe() const {
  const absl::MutexLock lock(&mu_);
  std::string text;
  const Deadline now = Clock::now();
  for (const auto& [id, use] : in_flight_) absl::StrAppend(&text, use->Describe(now));
  return text;
}

}  // namespace thinwire
