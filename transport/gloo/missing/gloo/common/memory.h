// Gloo's headers of pairs, contexts and buffers include a header of this name, which Gloo does not
// install. They only need the sizes of its pointers: each handle that knows whether its object is
// still alive is a std::weak_ptr, and a std::shared_ptr while it is in use. The functions that use
// them are compiled into Gloo. A test compares the resulting sizes with the library's.
#ifndef THINWIRE_TRANSPORT_GLOO_MISSING_GLOO_COMMON_MEMORY_H_
#define THINWIRE_TRANSPORT_GLOO_MISSING_GLOO_COMMON_MEMORY_H_

#include <memory>

namespace gloo {

// Its object is held by others through WeakNonOwningPtr. It is the last member of a class that only
// the library creates, so its size does not matter.
template <typename T>
class ShareableNonOwningPtr final {};

template <typename T>
class WeakNonOwningPtr final {
 public:
  WeakNonOwningPtr() = default;
  explicit WeakNonOwningPtr(const ShareableNonOwningPtr<T>&);

 private:
  std::weak_ptr<T> object_;
};

template <typename T>
class NonOwningPtr final {
  std::shared_ptr<T> object_;
};

}  // namespace gloo

#endif  // THINWIRE_TRANSPORT_GLOO_MISSING_GLOO_COMMON_MEMORY_H_
