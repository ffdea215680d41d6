// PlaneOver: the base of data planes for tests that change one thing about the plane below them.
#ifndef THINWIRE_TESTS_TRANSPORT_PLANE_OVER_H_
#define THINWIRE_TESTS_TRANSPORT_PLANE_OVER_H_

#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "transport/planes.h"

namespace thinwire {

// Forwards everything to the inner plane. Not a StreamPlane, since a plane from On would bypass the
// derived class.
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
  // Returns the same plane at every call; the derived class owns it.
  virtual DataPlane& inner() const = 0;
};

}  // namespace thinwire

#endif  // THINWIRE_TESTS_TRANSPORT_PLANE_OVER_H_
