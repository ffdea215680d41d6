// ExpectingPlane: the base of planes that block, match by tag and can always receive ahead. Their
// Start is Expect and Send.
#ifndef THINWIRE_TRANSPORT_EXPECTING_PLANE_H_
#define THINWIRE_TRANSPORT_EXPECTING_PLANE_H_

#include <cstdint>
#include <memory>
#include <span>

#include "transport/data_plane.h"

namespace thinwire {

class ExpectingPlane : public DataPlane {
 public:
  DataTraits traits() const final {
    return {Matching::kByTag, Completion::kBlocking, Memory::kHost};
  }

  std::unique_ptr<Exchange> Start(uint64_t tag, std::span<const Bytes> send,
                                  std::span<const MutableBytes> recv) final {
    std::unique_ptr<Exchange> exchange = Expect(tag, recv);
    exchange->Send(send);
    return exchange;
  }

  // Never null.
  std::unique_ptr<Exchange> Expect(uint64_t tag, std::span<const MutableBytes> recv) override = 0;
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_EXPECTING_PLANE_H_
