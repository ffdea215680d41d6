// OwnTensors: what this rank has submitted and not finished, by id.
#ifndef THINWIRE_SCHEDULE_ORDER_OWN_TENSORS_H_
#define THINWIRE_SCHEDULE_ORDER_OWN_TENSORS_H_

#include <cstdint>
#include <memory>

#include "schedule/order/frames.h"
#include "schedule/recycled_map.h"

namespace thinwire {

struct OwnTensor {
  Report report;
  double submitted = 0.0;  // seconds of the sequencer's clock
  double overdue_since = 0.0;
  uint32_t started = 0;  // chunks
  bool reported = false;
  bool overdue = false;
  std::shared_ptr<void> host;  // for StartChunk::host
};

using OwnTensors = RecycledMap<OwnTensor>;

}  // namespace thinwire

#endif  // THINWIRE_SCHEDULE_ORDER_OWN_TENSORS_H_
