#include "transport/ucx/ucx_library.h"

#include <signal.h>

#include <array>

#include "absl/strings/str_cat.h"
#include "transport/shared_library.h"

namespace thinwire {
namespace {

constexpr char kMend[] =
    "install libucx0 of Debian or the wheel libucx-cu13, name the file in THINWIRE_UCX_LIB, or set "
    "transport to gloo";

// UCX installs signal handlers when it is loaded: for crashes, which the training script must
// handle, and for SIGHUP, which nohup has set to be ignored.
class SignalHandlersKept {
 public:
  SignalHandlersKept() {
    for (size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], nullptr, &before_[i]);
  }
  ~SignalHandlersKept() {
    for (size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &before_[i], nullptr);
  }
  SignalHandlersKept(const SignalHandlersKept&) = delete;
  SignalHandlersKept& operator=(const SignalHandlersKept&) = delete;

 private:
  static constexpr std::array<int, 5> kSignals = {SIGILL, SIGSEGV, SIGBUS, SIGFPE, SIGHUP};
  std::array<struct sigaction, kSignals.size()> before_;
};

absl::Status Unusable(const std::string& path, const std::string& why) {
  return absl::UnimplementedError(
      absl::StrCat("UCX can't be used: ", path, ": ", why, "; ", kMend));
}

void FindAll(FunctionFinder& find, UcxLibrary* ucx) {
  find("ucp_config_read", &ucx->config_read);
  find("ucp_config_modify", &ucx->config_modify);
  find("ucp_config_release", &ucx->config_release);
  find("ucp_init_version", &ucx->init_version);
  find("ucp_cleanup", &ucx->cleanup);
  find("ucp_worker_create", &ucx->worker_create);
  find("ucp_worker_query", &ucx->worker_query);
  find("ucp_worker_destroy", &ucx->worker_destroy);
  find("ucp_worker_get_address", &ucx->worker_get_address);
  find("ucp_worker_release_address", &ucx->worker_release_address);
  find("ucp_worker_get_efd", &ucx->worker_get_efd);
  find("ucp_worker_arm", &ucx->worker_arm);
  find("ucp_worker_signal", &ucx->worker_signal);
  find("ucp_worker_progress", &ucx->worker_progress);
  find("ucp_ep_create", &ucx->ep_create);
  find("ucp_tag_send_nbx", &ucx->tag_send_nbx);
  find("ucp_tag_recv_nbx", &ucx->tag_recv_nbx);
  find("ucp_request_check_status", &ucx->request_check_status);
  find("ucp_request_cancel", &ucx->request_cancel);
  find("ucp_request_free", &ucx->request_free);
  find("ucs_status_string", &ucx->status_string);
}

}  // namespace

absl::StatusOr<std::shared_ptr<const UcxLibrary>> LoadUcx(const std::string& path) {
  const std::string name = path.empty() ? "libucp.so.0" : path;
  const SignalHandlersKept kept;
  void* const handle = OpenLibrary(name);
  if (handle == nullptr) return Unusable(name, WhyNotLoaded(name));
  decltype(&ucp_get_version) get_version;
  FunctionFinder find(handle);
  find("ucp_get_version", &get_version);
  if (!find.missing().empty()) return Unusable(name, absl::StrCat("it has no ", find.missing()));
  unsigned major = 0, minor = 0, release = 0;
  get_version(&major, &minor, &release);
  auto ucx = std::make_shared<UcxLibrary>();
  ucx->version = absl::StrCat(major, ".", minor, ".", release);
  if (major != 1 || minor < 13) {
    return Unusable(name,
                    absl::StrCat("its version is ", ucx->version, ", expected 1.13 or newer"));
  }
  FindAll(find, ucx.get());
  if (!find.missing().empty()) {
    return Unusable(name, absl::StrCat("it has no ", find.missing()));
  }
  return ucx;
}

}  // namespace thinwire
