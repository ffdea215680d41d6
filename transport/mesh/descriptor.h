// Descriptor: a file descriptor that its owner's destructor closes.
#ifndef THINWIRE_TRANSPORT_MESH_DESCRIPTOR_H_
#define THINWIRE_TRANSPORT_MESH_DESCRIPTOR_H_

#include <unistd.h>

#include <utility>

namespace thinwire {

// A movable value; a negative number means none.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() { Close(); }
  Descriptor(Descriptor&& other) noexcept : fd_(other.Release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    if (this != &other) {
      Close();
      fd_ = other.Release();
    }
    return *this;
  }

  int fd() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  int Release() { return std::exchange(fd_, -1); }  // the caller must close it

 private:
  void Close() {
    if (fd_ >= 0) close(fd_);
  }

  int fd_ = -1;
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_MESH_DESCRIPTOR_H_
