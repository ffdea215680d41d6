// tw_all_reduce*, tw_reduce_scatter, tw_all_gather, tw_wait*, tw_work_destroy.
#include <cstdint>
#include <memory>
#include <utility>

#include "integrations/c/border.h"

using thinwire::CollectiveRequest;
using thinwire::ToC;

namespace {

struct Call {
  const void* send;
  void* recv;
  size_t send_count, recv_count;
  tw_dtype dtype;
  tw_op op;
  tw_comm* comm;
  void* stream;
};

absl::StatusOr<thinwire::UsePtr> Start(const Call& call, CollectiveRequest request) {
  if (absl::Status bad = thinwire::CheckCall(call.comm, call.dtype, call.op, call.stream);
      !bad.ok()) {
    return bad;
  }
  request.input = thinwire::ViewOf(call.send, call.send_count, call.dtype);
  request.output = thinwire::ViewOf(call.recv, call.recv_count, call.dtype);
  request.op = static_cast<thinwire::Op>(call.op);
  request.stream = call.stream;
  return call.comm->engine->Start(request);
}

tw_status Run(const Call& call, const CollectiveRequest& request) {
  const absl::StatusOr<thinwire::UsePtr> work = Start(call, request);
  return ToC(work.ok() ? (*work)->Wait() : work.status());
}

template <typename Wait>
tw_status WaitFor(tw_work* work, Wait wait) {
  if (work == nullptr) return ToC(absl::InvalidArgumentError("the work is null"));
  if (absl::Status bad = thinwire::CheckHome(work->home); !bad.ok()) return ToC(bad);
  const std::unique_ptr<tw_work> owned(work);
  return ToC(wait(*owned->work));
}

// count * size; SIZE_MAX, which the checks refuse, if that overflows.
size_t OfAllRanks(size_t count, const tw_comm* comm) {
  const size_t size = comm == nullptr ? 1 : comm->size;
  return count > SIZE_MAX / size ? SIZE_MAX : count * size;
}

}  // namespace

extern "C" {

tw_status tw_all_reduce(const void* send, void* recv, size_t count, tw_dtype dtype, tw_op op,
                        tw_comm* comm, void* stream) {
  CollectiveRequest request;
  request.caller_waits = true;
  return Run({send, recv, count, count, dtype, op, comm, stream}, request);
}

tw_status tw_reduce_scatter(const void* send, void* recv, size_t recv_count, tw_dtype dtype,
                            tw_op op, tw_comm* comm, void* stream) {
  CollectiveRequest request;
  request.collective = thinwire::Collective::kReduceScatter;
  return Run({send, recv, OfAllRanks(recv_count, comm), recv_count, dtype, op, comm, stream},
             request);
}

tw_status tw_all_gather(const void* send, void* recv, size_t send_count, tw_dtype dtype,
                        tw_comm* comm, void* stream) {
  CollectiveRequest request;
  request.collective = thinwire::Collective::kAllGather;
  return Run({send, recv, send_count, OfAllRanks(send_count, comm), dtype, TW_SUM, comm, stream},
             request);
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
  if (work == nullptr) return ToC(absl::InvalidArgumentError("the place for the work is null"));
  *work = nullptr;
  if (num_segments > 0 && segments == nullptr) {
    return ToC(absl::InvalidArgumentError("the segments are null"));
  }
  if (absl::Status bad = thinwire::CheckItems("segments", num_segments); !bad.ok()) return ToC(bad);
  const thinwire::CallSegments parts = thinwire::SegmentsOf(segments, num_segments);
  CollectiveRequest request;
  request.key = thinwire::TextOf(name);
  request.priority = priority;
  request.segments = parts.segments;
  request.absent = parts.absent;
  absl::StatusOr<thinwire::UsePtr> started =
      Start({send, recv, count, count, dtype, op, comm, stream}, request);
  if (started.ok()) *work = new tw_work{*std::move(started)};
  return ToC(started.status());
}

tw_status tw_wait(tw_work* work) {
  return WaitFor(work, [](thinwire::Use& started) { return started.Wait(); });
}

tw_status tw_wait_stream(tw_work* work, void* stream) {
  return WaitFor(work, [stream](thinwire::Use& started) { return started.WaitOn(stream); });
}

void tw_work_destroy(tw_work* work) {
  if (work == nullptr || !thinwire::IsHome(work->home)) return;
  work->work->Wait().IgnoreError();
  delete work;
}

}  // extern "C"
