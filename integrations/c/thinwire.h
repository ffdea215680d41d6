/* thinwire: compressed allreduce of gradients. The C interface of libthinwire.so.
 *
 * Every function returns a tw_status; tw_last_error() has the message of the calling thread's last
 * failure: rank, tensor, what was expected, what came, and the mend. No function throws, aborts the
 * process, or waits past the deadline. All are thread-safe, but for destroying what is in use. */
#ifndef THINWIRE_INTEGRATIONS_C_THINWIRE_H_
#define THINWIRE_INTEGRATIONS_C_THINWIRE_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define TW_API __attribute__((visibility("default")))
#else
#define TW_API
#endif

typedef enum {
  TW_OK = 0,
  TW_INVALID_ARGUMENT = 1, /* bad input, seen before anything was sent */
  TW_MISMATCH = 2,         /* ranks disagree: codec, world, tensor, size, order, version */
  TW_TIMEOUT = 3,          /* a deadline passed */
  TW_PEER_LOST = 4,        /* a rank died or closed its connections */
  TW_UNAVAILABLE = 5,      /* this build or machine lacks a part */
  TW_ABORTED = 6,          /* tw_comm_abort, or the communicator was destroyed */
  TW_INTERNAL = 7          /* our own fault */
} tw_status;

/* The last value of each makes every int a valid one, so that a wrong one is an error, no more. */
typedef enum { TW_F32 = 0, TW_BF16 = 1, TW_F16 = 2, TW_DTYPE_IS_INT = 0x7fffffff } tw_dtype;
typedef enum { TW_MEAN = 0, TW_SUM = 1, TW_OP_IS_INT = 0x7fffffff } tw_op;

typedef struct tw_comm tw_comm; /* one process group */
typedef struct tw_work tw_work; /* one allreduce in flight */

/* Where ranks find each other. Both return 0, or another number on failure. */
typedef struct {
  void* context;
  int (*set)(void* context, const char* key, const void* value, size_t bytes);
  /* Waits up to timeout_ms for the key; writes at most `capacity` bytes and the value's size. */
  int (*get)(void* context, const char* key, void* value, size_t capacity, size_t* bytes,
             int timeout_ms);
} tw_store;

/* Zero means the default for every field but rank, size and the store. Call tw_options_init. */
typedef struct {
  size_t struct_size; /* sizeof(tw_options) */
  int rank, size;
  tw_store store;              /* used if store.set is not null, else store_path */
  const char* local_group;     /* else: all ranks are communicators of this process, made on a
                                  thread each, which meet under this name */
  const char* store_path;      /* else: a folder that all ranks share */
  const char* group;           /* key prefix, so that groups can share a store */
  const char* device;          /* "cpu" (default), "cuda" or "cuda:1": where all tensors lie */
  const char* cuda_library;    /* path of libthinwire_cuda.so; null: beside libthinwire.so */
  const char* codec;           /* "int4"; several, separated by ';', for tw_segment.codec */
  float momentum;              /* of SGD, owned by the communicator: means are momentum then */
  int nesterov;                /* non-zero: results are Nesterov steps */
  const char* policy;          /* "wfbp" (default), "fifo" or "p3" (lowest priority first) */
  int planned;                 /* order of steps (tw_comm_end_step): foretold above a millisecond of
                                  latency (0), always (above 0), never (below 0) */
  const char* interface_name;  /* network interface to listen on */
  const char* rendezvous_host; /* listen where this host is reached; else loopback */
  int lanes;                   /* chunks in flight */
  size_t chunk_bytes;          /* of fp32 input */
  size_t min_bytes;            /* smaller tensors go raw; SIZE_MAX: everything raw */
  int no_raw;                  /* non-zero: small tensors are compressed as well */
  int timeout_ms;              /* of connecting, and of one allreduce */
  const char* trace_path;      /* Chrome trace, written when the communicator is destroyed */
} tw_options;

TW_API const char* tw_version(void);    /* "0.1.0" */
TW_API const char* tw_last_error(void); /* of this thread; valid until its next failure */
TW_API void tw_options_init(tw_options* options);

TW_API tw_status tw_comm_create(const tw_options* options, tw_comm** comm);
TW_API tw_status tw_comm_abort(tw_comm* comm); /* fails the group on every rank */
TW_API void tw_comm_destroy(tw_comm* comm);    /* after all its works are freed by tw_wait */

/* In place if send == recv. `count` elements. On a device `stream` is a cudaStream_t, null the
 * default one: its work so far makes the input, and its later work may use the output as soon as
 * this returns. On the host it must be null. */
TW_API tw_status tw_all_reduce(const void* send, void* recv, size_t count, tw_dtype dtype, tw_op op,
                               tw_comm* comm, void* stream);

/* `name`: equal on all ranks; it carries the error feedback from call to call. Null: none. */
TW_API tw_status tw_all_reduce_async(const void* send, void* recv, size_t count, tw_dtype dtype,
                                     tw_op op, tw_comm* comm, void* stream, const char* name,
                                     int priority, tw_work** work);

/* Elements [offset, offset + count) of parameter `name` (of `total` elements), which go with codec
 * number `codec` of options.codec, from 0; the segments of a bucket follow one another and add up
 * to its count. `absent`, which ranks and calls may differ in: non-zero where this rank has no
 * gradient for it. Its elements must be zeros then, and what compression has kept of it stays. */
typedef struct {
  const char* name;
  size_t offset, count, total;
  size_t codec;
  int absent;
} tw_segment;
TW_API tw_status tw_all_reduce_segments(const void* send, void* recv, size_t count, tw_dtype dtype,
                                        tw_op op, tw_comm* comm, void* stream, const char* name,
                                        int priority, const tw_segment* segments,
                                        size_t num_segments, tw_work** work);

/* Waits, frees the work, returns its status. On a device the result is there for later work of the
 * stream that the call was made with, or of the one named here. The async calls themselves never
 * wait for a device, but where a name's layout is new. */
TW_API tw_status tw_wait(tw_work* work);
TW_API tw_status tw_wait_stream(tw_work* work, void* stream);

/* One shard of compress/FORMAT.md, of the first hop's codec if the spec has two. `residual` may be
 * null; else n floats, updated in place. A malformed shard is TW_INVALID_ARGUMENT. */
TW_API tw_status tw_encoded_bytes(const char* spec, size_t n, size_t* bytes);
TW_API tw_status tw_encode(const char* spec, const float* x, size_t n, float* residual, void* out,
                           size_t capacity, size_t* bytes);
TW_API tw_status tw_decode(const char* spec, const void* in, size_t bytes, float* x, size_t n);

typedef struct {
  uint64_t all_reduces, raw_bytes, wire_bytes; /* raw: fp32 ring's bytes; wire: sent by this rank */
  uint64_t planned_chunks;                     /* whose order was foretold */
  double queue_s, encode_s, exchange_s, reduce_s, gather_s, decode_s;
} tw_stats;
TW_API tw_status tw_comm_stats(tw_comm* comm, tw_stats* stats);

/* What codec number `index` of options.codec became: topk is int4 where that costs fewer bytes. */
TW_API tw_status tw_comm_codec(tw_comm* comm, size_t index, char* spec, size_t capacity);

/* Whether a tensor of that size goes uncompressed, because it is small. */
TW_API tw_status tw_comm_goes_raw(tw_comm* comm, size_t count, tw_dtype dtype, int* raw);

/* The step that the next allreduce of every name is, from 0: topk's warm-up and stochastic rounding
 * go by it. To be set on all ranks alike, when a run is resumed. */
TW_API tw_status tw_comm_set_step(tw_comm* comm, uint64_t step);

/* All of a training step has been submitted on this rank, and the next step will submit the same
 * tensors. Their order may then be foretold (tw_options.planned), which spares each chunk an
 * announcement. To be called on every rank; rank 0's call counts. */
TW_API tw_status tw_comm_end_step(tw_comm* comm);

/* What is kept of each parameter, while no allreduce is in flight: first-hop and second-hop
 * residuals, and the momentum if the communicator owns one; numel floats each. `index` counts
 * parameters in name order. `momentum` may be null: not asked for, or none to be set. */
TW_API tw_status tw_residual_count(tw_comm* comm, size_t* count);
TW_API tw_status tw_residual_info(tw_comm* comm, size_t index, char* name, size_t capacity,
                                  size_t* numel);
TW_API tw_status tw_residual_get(tw_comm* comm, const char* name, float* first, float* second,
                                 float* momentum, size_t numel);
TW_API tw_status tw_residual_set(tw_comm* comm, const char* name, const float* first,
                                 const float* second, const float* momentum, size_t numel);

/* How many CUDA devices can be used. TW_UNAVAILABLE, and the reason, if none can. */
TW_API tw_status tw_cuda_device_count(const char* cuda_library, int* count);

/* What a layer of a model, or several that are reduced together, computes in a step. */
typedef struct {
  size_t numel;
  double forward_s, backward_s;
} tw_layer;

/* A training step on a link, to be simulated: schedule/sim/simulator.h. */
typedef struct {
  size_t struct_size;        /* sizeof(tw_simulation) */
  const tw_options* options; /* size, codec, policy, lanes, chunk_bytes, min_bytes, no_raw */
  const tw_layer* layers;    /* in forward order */
  size_t num_layers;
  double between_s;                    /* after backward, before the first layer is needed again */
  int barrier;                         /* non-zero: the next forward pass waits for everything */
  int planned;                         /* non-zero: the order is foretold, not announced */
  double bytes_per_s, latency_s;       /* of each rank's link, one way */
  double burst_bytes;                  /* that an idle link lets pass at once */
  double overhead_s;                   /* of each exchange, beside its bytes */
  double encode_s, reduce_s, decode_s; /* of one element of a chunk, on one rank */
  double cpu_s_per_byte;               /* of the processor, for what a rank sends */
  double contention; /* of those with computing: 0 with cores to spare, 1 or more without */
  int steps;         /* whose mean is taken; 0: four */
} tw_simulation;

/* Seconds of a step, and, unless bound_s is null, the least that any order of chunks could take. */
TW_API tw_status tw_simulate(const tw_simulation* simulation, double* step_s, double* bound_s);

/* "AVX3", "AVX2", ...: the instruction set that the codecs use here. */
TW_API const char* tw_simd_target(void);

#ifdef __cplusplus
}
#endif

#endif /* THINWIRE_INTEGRATIONS_C_THINWIRE_H_ */
