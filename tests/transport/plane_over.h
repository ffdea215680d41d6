// PlaneOver: the base of data planes for tests that do one thing in another way than the plane
// below them.
#ifndef THINWIRE_TESTS_TRANSPORT_PLANE_OVER_H_
#define THINWIRE_TESTS_TRANSPORT_PLANE_OVER_H_

#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "transport/planes.h"

namespace thinwire {

// Passes everything on to the inner plane. It is no StreamPlane, since a plane from On would go
// round what a derived class does.
class PlaneOver : public DataPlane {
 public:
  const Membership& members() const override { return inner().members(); }
  DataTraits traits() const override { return inner().traits(); }
  std::unique_ptr<Exchange> Start(uint64_t tag, std::span<const Bytes> send,
                                  std::span<const MutableBytes> recv) override {
    return inner().Start(tag, send, recv);
  }
  std::unique_ptr<Exchange> Expect(uint64_t tag, std::span<const MutableBytes> recv) override {
    return inner().Expect(tag, recv);
  }
  const std::shared_ptr<Failure>& failure() const override { return inner().failure(); }
  uint64_t bytes_sent() const override { return inner().bytes_sent(); }

 protected:
  // The same one at every call; a derived class owns it.
  virtual DataPlane& inner() const = 0;
};

}  // namespace thinwire

#endif  // THINWIRE_TESTS_TRANSPORT_PLANE_OVER_H_
