#include "transport/planes.h"

namespace thinwire {

void Exchange::OnDone(std::function<void(absl::Status)> done) {
  done(absl::InternalError("this data plane's exchanges end by Wait only, not by OnDone"));
}

// A plane without Expect never gets here: its exchanges send when they start.
void Exchange::Send(std::span<const Bytes>) {}

std::unique_ptr<Exchange> DataPlane::Start(uint64_t tag, std::span<const Bytes> send,
                                           std::span<const MutableBytes> recv) {
  std::unique_ptr<Exchange> exchange = Expect(tag, recv);
  exchange->Send(send);
  return exchange;
}

std::unique_ptr<Exchange> DataPlane::Expect(uint64_t, std::span<const MutableBytes>) {
  return nullptr;
}

}  // namespace thinwire
