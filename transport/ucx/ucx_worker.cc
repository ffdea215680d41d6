#include "transport/ucx/ucx_worker.h"

#include <poll.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "transport/store.h"

namespace thinwire {
namespace {

struct Setting {
  const char* name;
  const char* value;
};

// Threads that wait for UCX's lock sleep, since the thread that holds it may need the core.
constexpr Setting kSettings[] = {
    {"TLS", "posix,self"}, {"RNDV_THRESH", "inf"}, {"USE_MT_MUTEX", "y"}};

using std::chrono::microseconds;

// Going to sleep and waking up cost about as much, so at most half of that time is wasted.
constexpr microseconds kSpin(50);

// Pauses while blocks wait for room at a peer, for which UCX has no event.
constexpr microseconds kShortestNap(50), kLongestNap(1000);

}  // namespace

absl::StatusOr<std::unique_ptr<UcxWorker>> UcxWorker::Make(std::shared_ptr<const UcxLibrary> ucx,
                                                           int size) {
  std::unique_ptr<UcxWorker> worker(new UcxWorker(std::move(ucx), size));
  if (absl::Status bad = worker->OpenContext(); !bad.ok()) return bad;
  if (absl::Status bad = worker->OpenWorker(); !bad.ok()) return bad;
  return worker;
}

absl::Status UcxWorker::OpenContext() {
  ucp_config_t* config = nullptr;
  ucs_status_t status = ucx_->config_read(nullptr, nullptr, &config);
  for (const Setting& setting : kSettings) {
    if (status == UCS_OK) status = ucx_->config_modify(config, setting.name, setting.value);
  }
  if (status == UCS_OK) {
    ucp_params_t params{};
    params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_ESTIMATED_NUM_EPS;
    params.features = UCP_FEATURE_TAG | UCP_FEATURE_WAKEUP;
    params.estimated_num_eps = endpoints_.size();
    status = ucx_->init_version(UCP_API_MAJOR, UCP_API_MINOR, &params, config, &context_);
  }
  if (config != nullptr) ucx_->config_release(config);
  if (status == UCS_OK) return absl::OkStatus();
  return absl::UnimplementedError(absl::StrCat(
      "UCX ", ucx_->version, " has no shared memory here: ", ucx_->status_string(status),
      "; set transport to gloo"));
}

absl::Status UcxWorker::OpenWorker() {
  ucp_worker_params_t params{};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_MULTI;
  ucs_status_t status = ucx_->worker_create(context_, &params, &worker_);
  ucp_worker_attr_t attributes{};
  attributes.field_mask = UCP_WORKER_ATTR_FIELD_THREAD_MODE;
  if (status == UCS_OK) status = ucx_->worker_query(worker_, &attributes);
  if (status == UCS_OK && attributes.thread_mode != UCS_THREAD_MODE_MULTI) {
    return absl::UnimplementedError(
        "this UCX was built without --enable-mt, so its workers serve one thread only; take "
        "Debian's or the wheel, or set transport to gloo");
  }
  if (status == UCS_OK) status = ucx_->worker_get_efd(worker_, &events_);
  if (status == UCS_OK) return absl::OkStatus();
  return absl::UnimplementedError(
      absl::StrCat("UCX ", ucx_->version, " opened no worker: ", ucx_->status_string(status),
                   "; look whether /dev/shm is full, or set transport to gloo"));
}

UcxWorker::~UcxWorker() {
  if (worker_ != nullptr) ucx_->worker_destroy(worker_);
  if (context_ != nullptr) ucx_->cleanup(context_);
}

absl::StatusOr<std::string> UcxWorker::Address() const {
  ucp_address_t* address = nullptr;
  size_t bytes = 0;
  const ucs_status_t status = ucx_->worker_get_address(worker_, &address, &bytes);
  if (status != UCS_OK) {
    return absl::UnimplementedError(
        absl::StrCat("UCX gave no address: ", ucx_->status_string(status)));
  }
  const std::string copy(reinterpret_cast<const char*>(address), bytes);
  ucx_->worker_release_address(worker_, address);
  return copy;
}

// The endpoint does not request error handling: shared memory can't report a peer's end.
absl::Status UcxWorker::Connect(int peer, const std::string& address) {
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS;
  params.address = reinterpret_cast<const ucp_address_t*>(address.data());
  const ucs_status_t status = ucx_->ep_create(worker_, &params, &endpoints_[peer]);
  if (status == UCS_OK) return absl::OkStatus();
  return absl::UnimplementedError(absl::StrCat("UCX does not reach rank ", peer, ": ",
                                               ucx_->status_string(status),
                                               "; set transport to gloo"));
}

ucs_status_ptr_t UcxWorker::Send(int peer, uint64_t tag, Bytes block, ucp_send_nbx_callback_t done,
                                 void* arg) {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.cb.send = done;
  param.user_data = arg;
  return ucx_->tag_send_nbx(endpoints_[peer], block.data(), block.size(), tag, &param);
}

ucs_status_ptr_t UcxWorker::Receive(uint64_t tag, MutableBytes block,
                                    ucp_tag_recv_nbx_callback_t done, void* arg) {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  param.cb.recv = done;
  param.user_data = arg;
  return ucx_->tag_recv_nbx(worker_, block.data(), block.size(), tag, ~uint64_t{0}, &param);
}

void UcxWorker::Release(void* request, bool cancel) {
  if (cancel && !HasEnded(request)) ucx_->request_cancel(worker_, request);
  ucx_->request_free(request);
}

bool UcxWorker::Sleep(Deadline until) {
  if (ucx_->worker_arm(worker_) != UCS_OK) return false;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now());
  pollfd events{events_, POLLIN, 0};
  const auto longest = std::chrono::milliseconds(std::chrono::hours(1));
  poll(&events, 1,
       static_cast<int>(std::clamp(left, std::chrono::milliseconds(0), longest).count()));
  return true;
}

UcxDriver::UcxDriver(UcxWorker& worker)
    : worker_(worker), listener_(failure_->Listen([this] { OnFailure(); })) {}

absl::Status UcxDriver::Await(const Flag& done, Deadline deadline) {
  while (NextTurn(done, deadline) == Turn::kLead) {
    Lead(done, deadline);
    StepDown();
  }
  return Leave(done);
}

// Abseil evaluates the conditions of waiting threads whenever the lock is released, and wakes only
// those whose condition holds.
UcxDriver::Turn UcxDriver::NextTurn(const Flag& done, Deadline deadline) {
  const absl::MutexLock lock(&mu_);
  const auto my_turn = [&] {
    mu_.AssertHeld();
    return done.load(std::memory_order_acquire) || failure_->failed() || !led_;
  };
  while (!my_turn()) {
    if (Clock::now() >= deadline) return Turn::kOver;
    mu_.AwaitWithTimeout(absl::Condition(&my_turn), TimeLeft(deadline));
  }
  if (done.load(std::memory_order_acquire) || failure_->failed() || Clock::now() >= deadline) {
    return Turn::kOver;
  }
  led_ = true;
  return Turn::kLead;
}

void UcxDriver::Lead(const Flag& done, Deadline deadline) {
  const auto over = [&] { return done.load(std::memory_order_acquire) || failure_->failed(); };
  Deadline spin_until = Clock::now() + kSpin;
  microseconds nap = kShortestNap;
  while (!over()) {
    if (worker_.Progress()) {
      spin_until = Clock::now() + kSpin;
      nap = kShortestNap;
      continue;
    }
    const Deadline now = Clock::now();
    if (now >= deadline) return;
    if (now < spin_until) {
      std::this_thread::yield();
      continue;
    }
    asleep_.store(true);
    const bool slept = !failure_->failed() && worker_.Sleep(deadline);
    asleep_.store(false);
    if (slept || over()) continue;
    std::this_thread::sleep_for(nap);
    nap = std::min(2 * nap, kLongestNap);
  }
}

void UcxDriver::StepDown() {
  const absl::MutexLock lock(&mu_);
  led_ = false;
}

absl::Status UcxDriver::Leave(const Flag& done) {
  const absl::MutexLock lock(&mu_);
  if (!failure_->failed()) {
    return done.load(std::memory_order_acquire) ? absl::OkStatus()
                                                : absl::DeadlineExceededError("");
  }
  const auto nobody_leads = [this] {
    mu_.AssertHeld();
    return !led_;
  };
  mu_.Await(absl::Condition(&nobody_leads));
  return failure_->reason();
}

void UcxDriver::Complete(Flag& done) {
  const absl::MutexLock lock(&mu_);
  done.store(true, std::memory_order_release);
}

void UcxDriver::Nudge() {
  if (asleep_.load()) worker_.Wake();
}

// Taking the lock makes waiting threads check their conditions.
void UcxDriver::OnFailure() {
  { const absl::MutexLock lock(&mu_); }
  worker_.Wake();
}

}  // namespace thinwire
