// UcxLibrary: the functions of libucp that the plane calls, found at run time.
#ifndef THINWIRE_TRANSPORT_UCX_UCX_LIBRARY_H_
#define THINWIRE_TRANSPORT_UCX_UCX_LIBRARY_H_

#include <ucp/api/ucp.h>

#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace thinwire {

// A table of functions under their names in ucp.h, without the prefix. Loading changes nothing else
// in the process: the signal handlers that UCX installs are removed again.
struct UcxLibrary {
  std::string version;

  decltype(&ucp_config_read) config_read;
  decltype(&ucp_config_modify) config_modify;
  decltype(&ucp_config_release) config_release;
  decltype(&ucp_init_version) init_version;
  decltype(&ucp_cleanup) cleanup;
  decltype(&ucp_worker_create) worker_create;
  decltype(&ucp_worker_query) worker_query;
  decltype(&ucp_worker_destroy) worker_destroy;
  decltype(&ucp_worker_get_address) worker_get_address;
  decltype(&ucp_worker_release_address) worker_release_address;
  decltype(&ucp_worker_get_efd) worker_get_efd;
  decltype(&ucp_worker_arm) worker_arm;
  decltype(&ucp_worker_signal) worker_signal;
  decltype(&ucp_worker_progress) worker_progress;
  decltype(&ucp_ep_create) ep_create;
  decltype(&ucp_tag_send_nbx) tag_send_nbx;
  decltype(&ucp_tag_recv_nbx) tag_recv_nbx;
  decltype(&ucp_request_check_status) request_check_status;
  decltype(&ucp_request_cancel) request_cancel;
  decltype(&ucp_request_free) request_free;
  decltype(&ucs_status_string) status_string;
};

// Unimplemented, with the fix, if libucp is missing or is older than 1.13.
absl::StatusOr<std::shared_ptr<const UcxLibrary>> LoadUcx(const std::string& path);

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_UCX_UCX_LIBRARY_H_
