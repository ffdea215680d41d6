// tw_options_init, tw_comm_*.
#include <algorithm>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "integrations/c/communicator.h"
#include "integrations/c/options.h"
#include "integrations/c/status.h"
#include "kernels/device.h"
#include "transport/nccl/nccl.h"
#include "transport/ucx/ucx.h"

using thinwire::ToC;

extern "C" {

void tw_options_init_sized(tw_options* options, size_t struct_size) {
  if (options == nullptr) return;
  std::memset(options, 0, struct_size);
  // tw_comm_create refuses a struct that is too small for the first release's fields.
  if (struct_size < thinwire::kFirstOptionsSize) return;
  options->struct_size = struct_size;
  options->size = 1;
}

// The parentheses keep the header's macro away.
void(tw_options_init)(tw_options* options) {
  tw_options_init_sized(options, thinwire::kFirstOptionsSize);
}

tw_status tw_comm_create(const tw_options* options, tw_comm** comm) {
  if (options == nullptr || comm == nullptr) {
    return ToC(absl::InvalidArgumentError("tw_comm_create got a null pointer"));
  }
  *comm = nullptr;
  const absl::StatusOr<tw_options> read = thinwire::ReadOptions(options);
  if (!read.ok()) return ToC(read.status());
  absl::StatusOr<std::unique_ptr<tw_comm>> made = thinwire::MakeCommunicator(*read);
  if (made.ok()) *comm = made->release();
  return ToC(made.status());
}

tw_status tw_comm_abort(tw_comm* comm) {
  if (absl::Status bad = thinwire::CheckComm("tw_comm_abort", comm); !bad.ok()) return ToC(bad);
  comm->engine->Abort(absl::AbortedError(absl::StrCat("rank ", comm->rank, " aborted the group")));
  return TW_OK;
}

tw_status tw_comm_fail(tw_comm* comm, tw_status status, const char* reason) {
  if (absl::Status bad = thinwire::CheckComm("tw_comm_fail", comm, {reason}); !bad.ok()) {
    return ToC(bad);
  }
  if (status == TW_OK) {
    return ToC(
        absl::InvalidArgumentError("tw_comm_fail got TW_OK, expected the status of a failure"));
  }
  comm->engine->Abort(thinwire::FromC(status, reason));
  return TW_OK;
}

void tw_comm_destroy(tw_comm* comm) {
  // A goodbye of a forked child would be its parent's, and the threads to join are not there.
  if (comm != nullptr && comm->home.is_here()) delete comm;
}

tw_status tw_comm_describe(tw_comm* comm, char* text, size_t capacity, size_t* bytes) {
  const void* const room = capacity == 0 ? bytes : static_cast<const void*>(text);
  if (absl::Status bad = thinwire::CheckComm("tw_comm_describe", comm, {bytes, room}); !bad.ok()) {
    return ToC(bad);
  }
  const std::string described =
      absl::StrCat("transport: ", comm->transport, "\ntopology: ", comm->topology, "\n",
                   comm->engine->Describe());
  *bytes = described.size() + 1;
  if (capacity == 0) return TW_OK;
  const size_t written = std::min(capacity - 1, described.size());
  std::memcpy(text, described.data(), written);
  text[written] = '\0';
  return TW_OK;
}

tw_status tw_comm_transport(tw_comm* comm, char* text, size_t capacity) {
  if (absl::Status bad = thinwire::CheckComm("tw_comm_transport", comm, {text}); !bad.ok()) {
    return ToC(bad);
  }
  return ToC(thinwire::WriteText("the transport", comm->transport, text, capacity));
}

tw_status tw_comm_topology(tw_comm* comm, char* text, size_t capacity) {
  if (absl::Status bad = thinwire::CheckComm("tw_comm_topology", comm, {text}); !bad.ok()) {
    return ToC(bad);
  }
  return ToC(thinwire::WriteText("the topology", comm->topology, text, capacity));
}

tw_status tw_comm_nodes(tw_comm* comm, tw_nodes* nodes) {
  if (absl::Status bad = thinwire::CheckComm("tw_comm_nodes", comm, {nodes}); !bad.ok()) {
    return ToC(bad);
  }
  *nodes = comm->nodes;
  return TW_OK;
}

tw_status tw_ucx_version(const char* library, char* text, size_t capacity) {
  if (text == nullptr) return ToC(absl::InvalidArgumentError("the place for the version is null"));
  const absl::StatusOr<std::string> version =
      thinwire::UcxVersion(std::string(thinwire::TextOf(library)));
  if (!version.ok()) return ToC(version.status());
  return ToC(thinwire::WriteText("the version", *version, text, capacity));
}

tw_status tw_nccl_version(const char* library, char* text, size_t capacity) {
  if (text == nullptr) return ToC(absl::InvalidArgumentError("the place for the version is null"));
  const absl::StatusOr<std::string> version =
      thinwire::NcclVersion(std::string(thinwire::TextOf(library)));
  if (!version.ok()) return ToC(version.status());
  return ToC(thinwire::WriteText("the version", *version, text, capacity));
}

tw_status tw_cuda_device_count(const char* cuda_library, int* count) {
  if (count == nullptr) return ToC(absl::InvalidArgumentError("the place for the count is null"));
  const absl::StatusOr<int> found =
      thinwire::CountDevices(std::string(thinwire::TextOf(cuda_library)));
  *count = found.value_or(0);
  return ToC(found.status());
}

}  // extern "C"
