#include "integrations/nccl_shim/nccl_reducer.h"

#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "schedule/collective/settle.h"
#include "schedule/engine/checks.h"

namespace thinwire {
namespace {

constexpr size_t kLargestBlock = 4096;           // that a codec may have
constexpr std::chrono::microseconds kPause(50);  // between questions to a busy NCCL

// By nodes where there are several: a flat exchange may send more over a node's network card than
// NCCL's ring. Where GPUs meet in host memory, what goes inside nodes is encoded as well.
Options OptionsFor(const CodecPair& codec, const Nodes& nodes) {
  Options options;
  options.codecs = {codec};
  options.topology = nodes.direct ? Topology::kHierarchical : Topology::kGrid;
  if (!nodes.refusal.empty()) options.topology = Topology::kFlat;
  options.local_size = nodes.local_size;
  options.chunk_bytes = kGpuChunk;  // of one stream they do not overlap
  return options;
}

}  // namespace

absl::StatusOr<std::unique_ptr<NcclReducer>> NcclReducer::Make(std::unique_ptr<NcclComm> comm,
                                                               std::shared_ptr<Device> device,
                                                               const CodecPair& codec,
                                                               const Nodes& nodes,
                                                               size_t feedback_bytes) {
  Options options = OptionsFor(codec, nodes);
  const absl::Status able = CheckKernels(options, *device);
  if (!able.ok()) return able;
  std::unique_ptr<NcclReducer> reducer(
      new NcclReducer(std::move(comm), std::move(device), std::move(options), feedback_bytes));
  if (absl::Status bad = reducer->buffers_.Prepare(); !bad.ok()) return bad;
  if (absl::Status bad = reducer->ReserveMemory(); !bad.ok()) return bad;
  return reducer;
}

NcclReducer::NcclReducer(std::unique_ptr<NcclComm> comm, std::shared_ptr<Device> device,
                         Options options, size_t feedback_bytes)
    : device_(std::move(device)),
      comm_(std::move(comm)),
      options_(std::move(options)),
      buffers_(*device_, comm_->members().size, options_, feedback_bytes) {}

// Results of equal shards lie in one block, and others do not: so the largest chunk with equal
// shards, and the largest without, need all there is.
absl::Status NcclReducer::ReserveMemory() {
  const Membership& members = comm_->members();
  const size_t most = kGpuChunk / sizeof(float) / 4 * 5;  // elements of a last chunk
  const size_t equal = most / kLargestBlock / members.size * kLargestBlock * members.size;
  for (const Collective collective : {Collective::kAllReduce, Collective::kReduceScatter}) {
    for (const size_t numel : {equal, most / members.size * members.size}) {
      const Partition partition = PartitionOf(collective, numel, members.size, options_);
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        ChunkJob job;
        job.codec = options_.codecs.front();
        job.chunk = &partition.chunks.front();
        job.input = {nullptr, numel, dtype};
        job.output = {nullptr, OutputNumel(collective, numel, members.size), dtype};
        size_ = ChunkMemory::Most(size_, MemoryOf(job, members, *device_));
      }
    }
  }
  absl::StatusOr<DeviceMemory> memory = device_->Allocate(size_.on_device());
  if (memory.ok()) memory_ = *std::move(memory);
  return memory.status();
}

void NcclReducer::UseStream(void* stream) {
  if (stream_ != nullptr && stream_->handle() == stream) return;
  stream_ = device_->Adopt(stream);
  const MutableBytes memory(memory_.get(), size_.on_device());
  codecs_ = stream_->BackendIn(memory.first(size_.room));
  space_.emplace(*codecs_, comm_->members(), memory.subspan(size_.room));
}

absl::Status NcclReducer::Reduce(Collective collective, TensorView input, TensorView output, Op op,
                                 void* stream, Deadline deadline) {
  for (const TensorView* view : {&input, &output}) {
    if (reinterpret_cast<uintptr_t>(view->data) % SizeOf(view->dtype) == 0) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", comm_->members().rank, ": an address is no multiple of the ",
                     SizeOf(view->dtype), " bytes of an element; align it"));
  }
  UseStream(stream);
  stream_->WaitFor(last_);
  const NcclBuffers::Buffer& buffer =
      buffers_.Use({input.data, input.numel, input.dtype, op, collective}, *stream_);
  for (const Chunk& chunk : buffer.partition.chunks) {
    ChunkJob job;
    job.codec = options_.codecs.front();
    job.chunk = &chunk;
    job.input = input;
    job.output = output;
    job.residual = reinterpret_cast<float*>(buffer.residual.get());
    job.scale = op == Op::kMean ? 1.0f / static_cast<float>(comm_->members().size) : 1.0f;
    job.tensor = buffer.number;
    job.step = buffer.uses;
    const std::unique_ptr<ChunkRun> run = chunk.algorithm->begin(job, *space_);
    if (absl::Status bad = Run(*run, deadline); !bad.ok()) return bad;
  }
  last_ = stream_->Record();
  return stream_->status();
}

absl::Status NcclReducer::Run(ChunkRun& run, Deadline deadline) {
  for (;;) {
    const absl::StatusOr<const Hop*> hop = run.Advance();
    if (!hop.ok()) return hop.status();
    if (*hop == nullptr) return absl::OkStatus();
    const NcclBlocks blocks{(*hop)->send, (*hop)->recv};
    const absl::StatusOr<NcclComm::Progress> progress =
        comm_->Launch({&blocks, 1}, stream_->handle());
    if (!progress.ok()) return progress.status();
    if (*progress == NcclComm::Progress::kDone) continue;
    if (absl::Status bad = AwaitIssue(deadline); !bad.ok()) return bad;
  }
}

absl::Status NcclReducer::AwaitIssue(Deadline deadline) {
  for (;;) {
    const absl::StatusOr<NcclComm::Progress> progress = comm_->Poll();
    if (!progress.ok()) return progress.status();
    if (*progress == NcclComm::Progress::kDone) return absl::OkStatus();
    if (Clock::now() > deadline) {
      return absl::DeadlineExceededError(
          absl::StrCat("rank ", comm_->members().rank,
                       ": NCCL did not take an exchange in time; is a rank gone?"));
    }
    std::this_thread::sleep_for(kPause);
  }
}

}  // namespace thinwire
