// NcclReducer: compressed allreduces and reduce-scatters on a communicator of the program's, on its
// streams.
//
// A call queues all of it and returns, as ncclAllReduce does: kernels that encode, NCCL's sends and
// receives, kernels that sum, encode and decode. Hops and their chunks are those of the engine
// (schedule/collective/); since all of it is work of one stream, chunks follow one another.
#ifndef THINWIRE_INTEGRATIONS_NCCL_SHIM_NCCL_REDUCER_H_
#define THINWIRE_INTEGRATIONS_NCCL_SHIM_NCCL_REDUCER_H_

#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "compress/device.h"
#include "integrations/nccl_shim/nccl_buffers.h"
#include "schedule/collective/algorithm.h"
#include "schedule/engine/workspaces.h"
#include "schedule/join/links.h"
#include "transport/nccl/nccl_comm.h"

namespace thinwire {

// NCCL wants one thread at a time to use a communicator, and so does this.
class NcclReducer {
 public:
  // Takes its memory here, where a lack of it can still be told to the other ranks.
  // ResourceExhausted, or Unimplemented: there are no kernels for that codec or so many ranks.
  static absl::StatusOr<std::unique_ptr<NcclReducer>> Make(std::unique_ptr<NcclComm> comm,
                                                           std::shared_ptr<Device> device,
                                                           const CodecPair& codec,
                                                           const Nodes& nodes,
                                                           size_t feedback_bytes);

  // An allreduce's input and output are of one size, and may be the same; a reduce-scatter's output
  // is this rank's part, and may lie in the input's. `stream` is the program's. If NCCL answers
  // «in progress», this waits until the deadline for it to take what comes next.
  absl::Status Reduce(Collective collective, TensorView input, TensorView output, Op op,
                      void* stream, Deadline deadline);

  // The way of allreduces, such as "hierarchical: 2 nodes of 2 ranks".
  std::string way() const { return DescribeWay(comm_->members().size, options_); }

 private:
  NcclReducer(std::unique_ptr<NcclComm> comm, std::shared_ptr<Device> device, Options options,
              size_t feedback_bytes);
  absl::Status ReserveMemory();
  void UseStream(void* stream);
  absl::Status Run(ChunkRun& run, Deadline deadline);
  absl::Status AwaitIssue(Deadline deadline);

  const std::shared_ptr<Device> device_;
  const std::unique_ptr<NcclComm> comm_;
  const Options options_;
  NcclBuffers buffers_;
  ChunkMemory size_;  // the most of any chunk
  DeviceMemory memory_;
  std::unique_ptr<DeviceStream> stream_;  // the last call's
  std::unique_ptr<Backend> codecs_;       // of that stream
  std::optional<Workspace> space_;
  std::shared_ptr<DeviceEvent> last_;  // the end of the last call's work
};

}  // namespace thinwire

#endif  // THINWIRE_INTEGRATIONS_NCCL_SHIM_NCCL_REDUCER_H_
