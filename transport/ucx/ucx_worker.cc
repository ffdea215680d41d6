#include "transport/ucx/ucx_worker.h"

#include <poll.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace thinwire {
namespace {

struct Setting {
  const char* name;
  const char* value;
};

// Whoever waits for UCX's lock sleeps, since the thread that holds it may need the core.
constexpr Setting kSettings[] = {
    {"TLS", "posix,self"}, {"RNDV_THRESH", "inf"}, {"USE_MT_MUTEX", "y"}};

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

// The endpoint does not ask to be told of its peer's end: shared memory can't tell.
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

}  // namespace thinwire
