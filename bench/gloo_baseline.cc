#include "bench/gloo_baseline.h"

#include <gloo/allreduce.h>
#include <gloo/barrier.h>
#include <gloo/broadcast.h>
#include <gloo/math.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>

namespace thinwire {

struct GlooBaseline::Impl {
  std::shared_ptr<gloo::rendezvous::Context> context;
  uint32_t tag = 0;
};

GlooBaseline::GlooBaseline(int rank, int size, const std::string& folder,
                           const std::string& interface)
    : impl_(std::make_unique<Impl>()) {
  gloo::transport::tcp::attr attr;
  if (interface.empty()) {
    attr.hostname = "127.0.0.1";
  } else {
    attr.iface = interface;
  }
  std::shared_ptr<gloo::transport::Device> device = gloo::transport::tcp::CreateDevice(attr);
  gloo::rendezvous::FileStore store(folder);
  impl_->context = std::make_shared<gloo::rendezvous::Context>(rank, size);
  impl_->context->connectFullMesh(store, device);
}

GlooBaseline::~GlooBaseline() = default;

void GlooBaseline::AllReduce(float* values, size_t count) {
  gloo::AllreduceOptions options(impl_->context);
  options.setOutput(values, count);
  options.setReduceFunction(
      static_cast<void (*)(void*, const void*, const void*, size_t)>(&gloo::sum<float>));
  options.setTag(++impl_->tag);
  gloo::allreduce(options);
}

void GlooBaseline::Broadcast(float* values, size_t count) {
  gloo::BroadcastOptions options(impl_->context);
  options.setOutput(values, count);
  options.setRoot(0);
  options.setTag(++impl_->tag);
  gloo::broadcast(options);
}

void GlooBaseline::Barrier() {
  gloo::BarrierOptions options(impl_->context);
  options.setTag(++impl_->tag);
  gloo::barrier(options);
}

}  // namespace thinwire
