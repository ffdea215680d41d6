#include "schedule/raw_exchange.h"

namespace thinwire {
namespace {

// f16 has no codec of its own and travels as fp32.
CodecSpec RawCodec(DType dtype) {
  return {.id = dtype == DType::kBF16 ? CodecId::kBf16 : CodecId::kFp32};
}

}  // namespace

RawExchange::RawExchange(uint64_t tag, TensorView input, const Backend& backend,
                         Transport& transport, LaneBuffers& buffers)
    : input_(input),
      codec_(RawCodec(input.dtype)),
      backend_(backend),
      rank_(transport.rank()),
      incoming_(transport.size()) {
  const size_t bytes = EncodedBytes(codec_, input.numel);
  std::vector<MutableBytes> recv;
  for (int r = 0; r < transport.size(); ++r) {
    recv.push_back(buffers.Take(bytes));
    incoming_[r] = r == rank_ ? nullptr : recv[r].data();
  }
  status_ = buffers.status();
  if (!status_.ok()) return;
  backend.Encode(codec_, input, nullptr, recv[rank_].data());
  const std::vector<Bytes> send(transport.size(), recv[rank_]);
  pending_ = transport.Start(tag, send, recv);
}

absl::Status RawExchange::Finish(TensorView output, float scale, Deadline deadline) {
  if (!status_.ok()) return status_;
  if (absl::Status status = pending_->Wait(deadline); !status.ok()) return status;
  backend_.Reduce({.up = codec_,
                   .down = {.id = CodecId::kFp32},
                   .wires = incoming_,
                   .own = input_,
                   .scale = scale,
                   .residual = nullptr,
                   .out = output,
                   .wire_out = nullptr});
  return absl::OkStatus();
}

}  // namespace thinwire
