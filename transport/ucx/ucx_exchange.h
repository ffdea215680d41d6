// UcxExchange: the blocks of one exchange, as UCX's tagged messages.
#ifndef THINWIRE_TRANSPORT_UCX_UCX_EXCHANGE_H_
#define THINWIRE_TRANSPORT_UCX_UCX_EXCHANGE_H_

#include <atomic>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "transport/planes.h"
#include "transport/ucx/ucx_driver.h"
#include "transport/ucx/ucx_worker.h"

namespace thinwire {

// The parts that the exchanges of one plane share. They outlive them.
struct UcxPlaneParts {
  Membership members;
  int first;  // the group's rank of the members' rank 0, for messages
  UcxWorker& worker;
  UcxDriver& driver;
  std::atomic<uint64_t>& bytes_sent;
};

class UcxExchange final : public Exchange {
 public:
  UcxExchange(const UcxPlaneParts& plane, uint64_t tag);
  ~UcxExchange() override;

  void Receive(std::span<const MutableBytes> recv);  // once, before Send
  void Send(std::span<const Bytes> send) override;
  absl::Status Wait(Deadline deadline) override;

 private:
  // A message on its way. Callbacks get its address, so it never moves.
  struct Message {
    UcxExchange* exchange;
    int peer;
    bool is_receive;
    void* request = nullptr;
  };

  Message& Begin(int peer, bool is_receive);
  void Began(Message& message, ucs_status_ptr_t request);
  void End(const Message& message, ucs_status_t status);
  void EndOne();
  // Takes back what has not ended. Nobody is inside Progress.
  void Cancel();
  absl::Status Late() const;
  int InGroup(int member) const { return plane_.first + member; }

  const UcxPlaneParts& plane_;
  const uint64_t tag_;
  std::vector<Message> messages_;  // room for all is reserved at the start
  std::atomic<int> open_{1};       // messages, and Send itself
  UcxDriver::Flag done_{false};
  bool waited_ = false;
};

}  // namespace thinwire

#endif  // THINWIRE_TRANSPORT_UCX_UCX_EXCHANGE_H_
