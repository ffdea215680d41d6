#include "transport/gloo/gloo_channel.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "transport/gloo/gloo_transfers.h"

namespace thinwire {

GlooChannel::GlooChannel(GlooShared& shared, int peer, GlooReceiver& receiver)
    : shared_(shared), peer_(peer), inbox_(shared, peer, receiver), sender_(shared, peer) {
  shared_.loop().Post(this);
}

void GlooChannel::OnProgress() {
  shared_.transfers().Collect(peer_);
  inbox_.Collect();
  inbox_.Refill();
  sender_.Collect();
}

// A connection may be closed from any thread, while the loop is busy with the channel.
void GlooChannel::OnClosed(const std::string& why) {
  closed_ = why;
  shared_.loop().Post(this);
}

void GlooChannel::Run() {
  if (std::exchange(observing_, true)) return Lost();
  Observe(shared_.context(), peer_, this);
  OnProgress();  // what came between the first receive and here, which nobody was told of
}

// A peer's last word and its end may come at once: the frames first.
void GlooChannel::Lost() {
  inbox_.Collect();
  sender_.Close();
  shared_.Fail(absl::UnavailableError(
      absl::StrCat("rank ", peer_, " is gone: its connection to rank ", shared_.members().rank,
                   " closed (", closed_, "); look why that process ended")));
}

}  // namespace thinwire
