#include "integrations/nccl_shim/nccl_session.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "transport/nccl/nccl.h"

namespace thinwire {
namespace {

// The names that the errors have in Python and in C.
const char* TypeOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument: return "InvalidArgumentError";
    case absl::StatusCode::kFailedPrecondition: return "MismatchError";
    case absl::StatusCode::kDeadlineExceeded: return "TimeoutError";
    default: return "UnavailableError";
  }
}

constexpr char kReady = '+', kRefusal = '-';
constexpr char kMeetInHostMemory[] = "host";  // of GPUs that do not reach one another's memory

// A rank says at a meeting that it is ready, and the text; or why it takes no part.
std::string Said(const absl::Status& able, const std::string& text) {
  return able.ok() ? kReady + text : kRefusal + std::string(able.message());
}

// The same on all ranks.
absl::Status FirstRefusal(const std::vector<std::string>& said) {
  for (size_t rank = 0; rank < said.size(); ++rank) {
    if (said[rank].starts_with(kReady)) continue;
    return absl::UnimplementedError(absl::StrCat(
        "rank ", rank, " takes no part: ", said[rank].empty() ? "" : said[rank].substr(1)));
  }
  return absl::OkStatus();
}

// The parts are the rank's terms, its node, and whether its GPU meets others in host memory. Ranks
// of another version may say something else.
std::vector<std::string> PartsOf(const std::string& said) {
  std::vector<std::string> parts = absl::StrSplit(said.substr(1), '\n');
  parts.resize(3);
  return parts;
}

}  // namespace

bool NcclSession::IsCapturing(void* stream) {
  return device() != nullptr && device()->Adopt(stream)->IsCapturing();
}

Device* NcclSession::device() {
  if (device_.ok() && *device_ == nullptr) {
    int ordinal = 0;
    const NcclResult result = means_.next.comm_device(handle_, &ordinal);
    device_ = result == kNcclOk
                  ? means_.open_device(ordinal)
                  : absl::InternalError(absl::StrCat("NCCL does not say which device it is on (",
                                                     static_cast<int>(result), ")"));
  }
  return device_.ok() ? device_->get() : nullptr;
}

NcclReducer* NcclSession::reducer() {
  if (asked_) return agreed_ ? reducer_.get() : nullptr;
  asked_ = true;
  const absl::Status agreed = Agree();
  agreed_ = agreed.ok();
  means_.say(absl::StrCat(
      "rank ", members_.rank, " of ", members_.size, ": ",
      agreed_ ? absl::StrCat("allreduces of ", settings_.min_bytes,
                             " bytes and more on this communicator go as ",
                             settings_.codec.ToString(), ", ", reducer_->way())
              : absl::StrCat(TypeOf(agreed), ": this communicator goes on uncompressed, on ",
                             "all ranks: ", agreed.message())));
  return agreed_ ? reducer_.get() : nullptr;
}

// The ranks meet twice: to find the terms and the nodes, from which the memory follows that each
// needs, and to hear that all have it.
absl::Status NcclSession::Agree() {
  const absl::StatusOr<Nodes> nodes = AgreeOnTerms();
  if (!nodes.ok()) return nodes.status();
  const absl::StatusOr<std::vector<std::string>> outcomes =
      TellAllAt(meeting_, members_, 1, Said(MakeReducer(*nodes), ""), settings_.timeout);
  return outcomes.ok() ? FirstRefusal(*outcomes) : outcomes.status();
}

absl::StatusOr<Nodes> NcclSession::AgreeOnTerms() {
  const std::string terms =
      absl::StrCat(settings_.codec.ToString(), " from ", settings_.min_bytes, " bytes on for ",
                   settings_.reduce_scatter ? "allreduces and reduce-scatters" : "allreduces",
                   " (thinwire " THINWIRE_VERSION ")");
  absl::Status able = settings_.refusal;
  bool direct = true;
  if (able.ok()) {
    Device* const own = device();
    able = device_.status();
    const absl::StatusOr<PeerReach> reach = own == nullptr ? PeerReach::kBus : own->ReachesPeers();
    direct = !reach.ok() || *reach != PeerReach::kHostMemory;
  }
  const absl::StatusOr<std::vector<std::string>> all = TellAllAt(
      meeting_, members_, 0,
      Said(able, absl::StrCat(terms, "\n", means_.node, "\n", direct ? "" : kMeetInHostMemory)),
      settings_.timeout);
  if (!all.ok()) return all.status();
  if (absl::Status refusal = FirstRefusal(*all); !refusal.ok()) return refusal;

  std::vector<std::string> identities;
  const std::string first = PartsOf(all->front())[0];
  for (size_t rank = 0; rank < all->size(); ++rank) {
    const std::vector<std::string> parts = PartsOf((*all)[rank]);
    if (parts[0] != first) {
      return absl::FailedPreconditionError(absl::StrCat(
          "rank ", rank, " wants ", parts[0], ", expected rank 0's ", first,
          "; set THINWIRE_NCCL_CODEC, _MIN_BYTES and _REDUCE_SCATTER alike on all ranks"));
    }
    identities.push_back(parts[1]);
    direct &= parts[2] != kMeetInHostMemory;
  }
  Nodes nodes = NodesOf(identities);
  nodes.direct = direct;
  return nodes;
}

absl::Status NcclSession::MakeReducer(const Nodes& nodes) {
  absl::StatusOr<std::shared_ptr<const NcclLibrary>> nccl = means_.load_nccl();
  if (!nccl.ok()) return nccl.status();
  absl::StatusOr<std::unique_ptr<NcclReducer>> made =
      NcclReducer::Make(NcclComm::Borrow(*std::move(nccl), members_, handle_, *device_), *device_,
                        settings_.codec, nodes, settings_.feedback_bytes);
  if (made.ok()) reducer_ = *std::move(made);
  return made.status();
}

}  // namespace thinwire
