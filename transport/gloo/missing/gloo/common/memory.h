// Gloo's headers of pairs, contexts and buffers include a header of this name, which Gloo does not
// install. They need no more of it than how large its pointers are: handles that know whether their
// object still lives, a std::weak_ptr each, and a std::shared_ptr while it is in use. The functions
// that use them are compiled into Gloo. A test compares the sizes that follow with the library's.
#ifndef THINWIRE_TRANSPORT_GLOO_MISSING_GLOO_COMMON_MEMORY_H_
#define THINWIRE_TRANSPORT_GLOO_MISSING_GLOO_COMMON_MEMORY_H_

#include <memory>

namespace gloo {

// Whose object others hold by WeakNonOwningPtr. It is the last member of a class that the library
// alone creates, so its size is of no matter.
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
