// TransportKind: on what a group's data plane is asked to run.
#ifndef THINWIRE_TRANSPORT_TRANSPORT_KIND_H_
#define THINWIRE_TRANSPORT_TRANSPORT_KIND_H_

#include <cstdint>
#include <string_view>

namespace thinwire {

// How planes put blocks into messages. Ranks of different versions would never meet, so they are
// told apart before they connect. 2: small blocks travel in parcels (gloo/gloo_parcels.h).
inline constexpr int kFramingVersion = 2;

// gloo: Gloo's, which needs nothing else. ucx: UCX's, for ranks that share one host's memory. nccl:
// NCCL's, for ranks with GPUs of their own. auto: NCCL's where all ranks can, else UCX's, else
// Gloo's.
enum class TransportKind : uint8_t { kGloo, kUcx, kAuto, kNccl };

constexpr std::string_view Name(TransportKind kind) {
  switch (kind) {
    case TransportKind::kGloo: return "gloo";
    case TransportKind::kUcx: return "ucx";
    case TransportKind::kAuto: return "auto";
    case TransportKind::kNccl: return "nccl";
  }
  return "unknown transport";
}

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_TRANSPORT_KIND_H_
