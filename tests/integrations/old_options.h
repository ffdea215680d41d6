/* The structs of the first release's thinwire.h, frozen. Programs that were compiled against them
 * run with every later library, so nothing here is ever edited. C and C++ tests include it, the
 * latter within a namespace. */
#include <stddef.h>
#include <stdint.h>

typedef struct {
  void* context;
  int (*set)(void* context, const char* key, const void* value, size_t bytes);
  int (*get)(void* context, const char* key, void* value, size_t capacity, size_t* bytes,
             int timeout_ms);
} tw_store;

typedef struct {
  size_t struct_size;
  int rank, size;
  tw_store store;
  const char* local_group;
  const char* store_path;
  const char* group;
  const char* device;
  const char* cuda_library;
  const char* codec;
  float momentum;
  int nesterov;
  const char* policy;
  int planned;
  const char* interface_name;
  const char* rendezvous_host;
  int lanes;
  size_t chunk_bytes;
  size_t min_bytes;
  int no_raw;
  int timeout_ms;
  const char* trace_path;
} tw_options;

typedef struct {
  const char* name;
  size_t offset, count, total;
  size_t codec;
  int absent;
} tw_segment;

typedef struct {
  uint64_t all_reduces, raw_bytes, wire_bytes;
  uint64_t planned_chunks;
  double queue_s, encode_s, exchange_s, reduce_s, gather_s, decode_s;
} tw_stats;

typedef struct {
  size_t numel;
  double forward_s, backward_s;
} tw_layer;

typedef struct {
  size_t struct_size;
  const tw_options* options;
  const tw_layer* layers;
  size_t num_layers;
  double between_s;
  int barrier;
  int planned;
  double bytes_per_s, latency_s;
  double burst_bytes;
  double overhead_s;
  double encode_s, reduce_s, decode_s;
  double cpu_s_per_byte;
  double contention;
  int steps;
} tw_simulation;
