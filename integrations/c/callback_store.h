// A Store whose set and get are the C caller's functions.
#ifndef THINWIRE_INTEGRATIONS_C_CALLBACK_STORE_H_
#define THINWIRE_INTEGRATIONS_C_CALLBACK_STORE_H_

#include <memory>

#include "integrations/c/thinwire.h"
#include "transport/store.h"

namespace thinwire {

std::shared_ptr<Store> MakeCallbackStore(const tw_store& callbacks);

}  // namespace thinwire

#endif  // THINWIRE_INTEGRATIONS_C_CALLBACK_STORE_H_
