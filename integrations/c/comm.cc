// tw_comm_*, tw_all_reduce*, tw_wait.
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "integrations/c/communicator.h"
#include "integrations/c/status.h"
#include "kernels/device.h"

using thinwire::ToC;

namespace {

absl::Status CheckCall(const tw_comm* comm, tw_dtype dtype, tw_op op, const void* stream) {
  if (comm == nullptr) return absl::InvalidArgumentError("the communicator is null");
  if (dtype != TW_F32 && dtype != TW_BF16 && dtype != TW_F16) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", comm->rank, ": dtype ", static_cast<int>(dtype),
                     " is unknown, expected TW_F32, TW_BF16 or TW_F16"));
  }
  if (op != TW_MEAN && op != TW_SUM) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", comm->rank, ": op ",
                                                   static_cast<int>(op),
                                                   " is unknown, expected TW_MEAN or TW_SUM"));
  }
  if (stream != nullptr && !comm->on_device) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", comm->rank, ": a stream was given, expected null, since this ",
                     "communicator is the host's; make one with options.device = \"cuda\""));
  }
  return absl::OkStatus();
}

thinwire::TensorView View(const void* data, size_t count, tw_dtype dtype) {
  return {const_cast<void*>(data), count, static_cast<thinwire::DType>(dtype)};
}

struct Call {
  const void* send;
  void* recv;
  size_t count;
  tw_dtype dtype;
  tw_op op;
  tw_comm* comm;
  void* stream;
};

absl::StatusOr<std::shared_ptr<thinwire::Work>> Start(const Call& call,
                                                      thinwire::AllReduceRequest request) {
  if (absl::Status bad = CheckCall(call.comm, call.dtype, call.op, call.stream); !bad.ok())
    return bad;
  request.input = View(call.send, call.count, call.dtype);
  request.output = View(call.recv, call.count, call.dtype);
  request.op = static_cast<thinwire::Op>(call.op);
  request.stream = call.stream;
  return call.comm->engine->AllReduce(request);
}

tw_status StartAsync(const Call& call, const thinwire::AllReduceRequest& request, tw_work** work) {
  if (work == nullptr) return ToC(absl::InvalidArgumentError("the place for the work is null"));
  *work = nullptr;
  absl::StatusOr<std::shared_ptr<thinwire::Work>> started = Start(call, request);
  if (started.ok()) *work = new tw_work{*std::move(started)};
  return ToC(started.status());
}

std::string_view TextOf(const char* text) { return text == nullptr ? "" : text; }

}  // namespace

extern "C" {

void tw_options_init(tw_options* options) {
  if (options == nullptr) return;
  *options = tw_options{};
  options->struct_size = sizeof(tw_options);
  options->size = 1;
}

tw_status tw_comm_create(const tw_options* options, tw_comm** comm) {
  if (options == nullptr || comm == nullptr) {
    return ToC(absl::InvalidArgumentError("tw_comm_create got a null pointer"));
  }
  *comm = nullptr;
  absl::StatusOr<std::unique_ptr<tw_comm>> made = thinwire::MakeCommunicator(*options);
  if (made.ok()) *comm = made->release();
  return ToC(made.status());
}

tw_status tw_comm_abort(tw_comm* comm) {
  if (comm == nullptr) return ToC(absl::InvalidArgumentError("the communicator is null"));
  comm->engine->Abort(absl::AbortedError(absl::StrCat("rank ", comm->rank, " aborted the group")));
  return TW_OK;
}

void tw_comm_destroy(tw_comm* comm) { delete comm; }

tw_status tw_all_reduce(const void* send, void* recv, size_t count, tw_dtype dtype, tw_op op,
                        tw_comm* comm, void* stream) {
  thinwire::AllReduceRequest request;
  request.caller_waits = true;
  absl::StatusOr<std::shared_ptr<thinwire::Work>> work =
      Start({send, recv, count, dtype, op, comm, stream}, request);
  return ToC(work.ok() ? (*work)->Wait() : work.status());
}

tw_status tw_all_reduce_async(const void* send, void* recv, size_t count, tw_dtype dtype, tw_op op,
                              tw_comm* comm, void* stream, const char* name, int priority,
                              tw_work** work) {
  return tw_all_reduce_segments(send, recv, count, dtype, op, comm, stream, name, priority, nullptr,
                                0, work);
}

tw_status tw_all_reduce_segments(const void* send, void* recv, size_t count, tw_dtype dtype,
                                 tw_op op, tw_comm* comm, void* stream, const char* name,
                                 int priority, const tw_segment* segments, size_t num_segments,
                                 tw_work** work) {
  if (num_segments > 0 && segments == nullptr) {
    return ToC(absl::InvalidArgumentError("the segments are null"));
  }
  std::vector<thinwire::Segment> parts;
  std::vector<uint32_t> absent;
  for (size_t i = 0; i < num_segments; ++i) {
    const tw_segment& s = segments[i];
    parts.push_back({.name = std::string(TextOf(s.name)),
                     .offset = s.offset,
                     .count = s.count,
                     .total = s.total,
                     .codec = static_cast<uint32_t>(s.codec)});
    if (s.absent != 0) absent.push_back(static_cast<uint32_t>(i));
  }
  thinwire::AllReduceRequest request;
  request.key = TextOf(name);
  request.priority = priority;
  request.segments = parts;
  request.absent = absent;
  return StartAsync({send, recv, count, dtype, op, comm, stream}, request, work);
}

tw_status tw_wait(tw_work* work) {
  if (work == nullptr) return ToC(absl::InvalidArgumentError("the work is null"));
  const std::unique_ptr<tw_work> owned(work);
  return ToC(owned->work->Wait());
}

tw_status tw_wait_stream(tw_work* work, void* stream) {
  if (work == nullptr) return ToC(absl::InvalidArgumentError("the work is null"));
  const std::unique_ptr<tw_work> owned(work);
  return ToC(owned->work->WaitOn(stream));
}

tw_status tw_cuda_device_count(const char* cuda_library, int* count) {
  if (count == nullptr) return ToC(absl::InvalidArgumentError("the place for the count is null"));
  const absl::StatusOr<int> found = thinwire::CountDevices(std::string(TextOf(cuda_library)));
  *count = found.value_or(0);
  return ToC(found.status());
}

}  // extern "C"
