/* thinwire: compressed allreduce of gradients. The C interface of libthinwire.so.
 *
 * Every function returns a tw_status; tw_last_error() has the message of the calling thread's last
 * failure: rank, tensor, the expected value, the actual value, and the fix. No function throws,
 * aborts the process, or waits past the deadline. All functions are thread-safe, except that an
 * object must not be destroyed while another call uses it.
 *
 * A communicator, its works and buckets, and a store belong to the process that created them. In a
 * forked child every call on them returns TW_INVALID_ARGUMENT at once, and destroying them does
 * nothing.
 */
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
  TW_INVALID_ARGUMENT = 1, /* bad input, found before anything was sent */
  TW_MISMATCH = 2,         /* ranks disagree: codec, world, tensor, size, order, version */
  TW_TIMEOUT = 3,          /* a deadline passed */
  TW_PEER_LOST = 4,        /* a rank died or closed its connections */
  TW_UNAVAILABLE = 5,      /* this build or machine lacks a part */
  TW_ABORTED = 6,          /* tw_comm_abort, or the communicator was destroyed */
  TW_INTERNAL = 7,         /* a bug in thinwire */
  TW_DATA_LOSS = 8,        /* damaged bytes: from a peer (found by tw_options.checksum) or in a
                              store's journal */
  TW_OUT_OF_MEMORY = 9     /* no device, pinned or host memory left, or this process cannot start
                              another thread */
} tw_status;

/* The last enumerator makes every int a valid value of the type, so that a wrong one is reported as
 * an error and is not undefined behaviour. */
typedef enum { TW_F32 = 0, TW_BF16 = 1, TW_F16 = 2, TW_DTYPE_IS_INT = 0x7fffffff } tw_dtype;
typedef enum { TW_MEAN = 0, TW_SUM = 1, TW_OP_IS_INT = 0x7fffffff } tw_op;

typedef struct tw_comm tw_comm;     /* one process group */
typedef struct tw_work tw_work;     /* one allreduce in flight */
typedef struct tw_bucket tw_bucket; /* a tensor that is described once and reduced in every step */

/* The rendezvous store, where ranks find each other. Both functions return 0 on success. */
typedef struct {
  void* context;
  int (*set)(void* context, const char* key, const void* value, size_t bytes);
  /* Waits up to timeout_ms for the key. Writes at most `capacity` bytes of the value, and its whole
   * size to *bytes. */
  int (*get)(void* context, const char* key, void* value, size_t capacity, size_t* bytes,
             int timeout_ms);
} tw_store;

/* Call tw_options_init first. Zero means the default for every field but rank, size and the store.
 * docs/reference/settings.md has each field's default, and says which must be equal on all ranks.
 *
 * A program that was compiled against an older, shorter struct keeps working: struct_size tells the
 * library which fields it has, and the others get their defaults. Therefore a field never moves,
 * and a new one goes to the end and takes 8 bytes, so that no padding is ever read as a field. */
typedef struct {
  size_t struct_size; /* sizeof(tw_options) */
  int rank, size;
  tw_store store;              /* used if store.set is not null, else store_path */
  const char* local_group;     /* else: all ranks are communicators of this process, each created
                                  on a thread of its own, which meet under this name */
  const char* store_path;      /* else: a folder that all ranks share */
  const char* group;           /* key prefix, so that groups can share a store */
  const char* device;          /* "cpu" (default), "cuda" or "cuda:1": where all tensors lie */
  const char* cuda_library;    /* path of libthinwire_cuda.so; null: beside libthinwire.so */
  const char* codec;           /* "int4"; several, separated by ';', for tw_segment.codec */
  float momentum;              /* not 0: SGD's momentum, which the communicator then owns: results
                                  are momentum in place of means */
  int nesterov;                /* non-zero: results are Nesterov steps of that momentum */
  const char* policy;          /* "wfbp" (default), "fifo" or "p3" (lowest priority first) */
  int planned;                 /* when the order of a step (tw_comm_end_step) is predicted: 0: above
                                  1 ms of latency; above 0: always; below 0: never */
  const char* interface_name;  /* network interface to listen on */
  const char* rendezvous_host; /* listen where this host is reached; else loopback */
  int lanes;                   /* chunks in flight */
  size_t chunk_bytes;     /* bytes of fp32 input in a chunk; 0: 4 MiB, 32 MiB over NCCL, 1 MiB under
                             p3, and more in large worlds */
  size_t min_bytes;       /* tensors whose bytes times (ranks - 1) are at most this are sent
                             uncompressed; SIZE_MAX: all tensors */
  int no_raw;             /* non-zero: small tensors are compressed, too */
  int timeout_ms;         /* deadline of connecting, and of one allreduce */
  const char* trace_path; /* Chrome trace, written when the communicator is destroyed */
  /* The first release ended here. */
  const char* flight_path; /* file for the engine's last events, written at its first failure */
  const char* key_file;    /* file of mode 0600 with the group's secret, equal on all ranks; null on
                              every rank: a random token in the store */
  size_t checksum;         /* non-zero: a CRC32C goes with all bytes of tensors, and is checked */
  const char* topology;  /* of dense allreduces: "flat", from each rank to all others; "grid", along
                            the rows and columns of a grid; "hierarchical", uncompressed inside
                            nodes and compressed between them; "auto" (default): "hierarchical" if
                            the links inside nodes are measured to be faster, else "grid" from 64
                            ranks on, else "flat" */
  size_t recoverable;    /* non-zero: tw_residual_undo works; doubles the memory of residuals and
                            momentum */
  size_t check_replicas; /* reserved, must be 0; callers compare parameters with tw_digest */
  const char* transport; /* of the data: "gloo" (default, TCP); "ucx": shared memory of one host,
                            which all ranks must be on; "nccl": each rank has a GPU of its own;
                            "auto": "nccl" if all ranks can use it, else "ucx", else "gloo" */
  const char* ucx_library;  /* path of libucp.so.0; null: where the dynamic linker looks */
  const char* nccl_library; /* path of libnccl.so.2; null: the copy that is loaded, else the wheel's
                               beside the package, else where the dynamic linker looks */
  size_t local_size; /* ranks of a node, which have consecutive numbers; 0: a node is the ranks on
                        one running kernel and in one network namespace */
  const char* congestion; /* TCP congestion control of the connections, by the kernel's name;
                             "system" (default): the kernel's default */
  size_t loops; /* threads that move the bytes over TCP, each with its own connections to all ranks;
                   0: 1; at most 16 */
} tw_options;

TW_API const char* tw_version(void);    /* "0.1.0" */
TW_API const char* tw_last_error(void); /* of this thread; valid until its next failure */

/* Fills a struct of struct_size bytes with defaults. The macro tw_options_init passes the size of
 * the struct that its caller was compiled with. The function of the same name is for programs that
 * were compiled against the first release, and writes only that release's fields. */
TW_API void tw_options_init_sized(tw_options* options, size_t struct_size);
TW_API void tw_options_init(tw_options* options);
#define tw_options_init(options) tw_options_init_sized((options), sizeof(tw_options))

TW_API tw_status tw_comm_create(const tw_options* options, tw_comm** comm);
TW_API tw_status tw_comm_abort(tw_comm* comm); /* fails the group on every rank */
/* Like tw_comm_abort, with the caller's own reason: afterwards every rank's calls return `status`
 * (any but TW_OK) with a message that contains `reason`, unless the group had failed before. */
TW_API tw_status tw_comm_fail(tw_comm* comm, tw_status status, const char* reason);
TW_API void tw_comm_destroy(tw_comm* comm); /* after all its works are freed */

/* In place if send == recv; otherwise the two must not overlap. `count` elements, at most 2^36 as
 * in all calls. On a device `stream` is a cudaStream_t (null: the default stream): the input is
 * ready after the work queued on it so far, and work queued on it after this returns may use the
 * output. On the host it must be null. */
TW_API tw_status tw_all_reduce(const void* send, void* recv, size_t count, tw_dtype dtype, tw_op op,
                               tw_comm* comm, void* stream);

/* The two halves of an allreduce, with n ranks. tw_reduce_scatter: `send` has n * recv_count
 * elements, and rank r gets part r of the mean or sum, recv_count elements. tw_all_gather: every
 * rank gets n * send_count elements, those of all ranks in rank order, bit-identical on all ranks.
 * `send` and `recv` must not overlap, except that recv may be send + rank * recv_count, and in
 * tw_all_gather send may be recv + rank * send_count (in elements). Tensors of every size are
 * compressed. TW_INVALID_ARGUMENT with topk. */
TW_API tw_status tw_reduce_scatter(const void* send, void* recv, size_t recv_count, tw_dtype dtype,
                                   tw_op op, tw_comm* comm, void* stream);
TW_API tw_status tw_all_gather(const void* send, void* recv, size_t send_count, tw_dtype dtype,
                               tw_comm* comm, void* stream);

/* `name`: equal on all ranks; calls with one name share their residual (error feedback). Null: no
 * residual is kept. */
TW_API tw_status tw_all_reduce_async(const void* send, void* recv, size_t count, tw_dtype dtype,
                                     tw_op op, tw_comm* comm, void* stream, const char* name,
                                     int priority, tw_work** work);

/* Elements [offset, offset + count) of parameter `name`, which has `total` elements. They are
 * encoded with codec number `codec` of options.codec, counted from 0. The segments of a bucket
 * follow one another and add up to its count. `absent` may differ between ranks and between calls;
 * non-zero: this rank has no gradient for the segment. Then its elements must be zeros, and its
 * residual is left as it is. */
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

/* Waits, frees the work, and returns its status. On a device the result is ready for later work of
 * the stream that the call was made with (tw_wait) or of `stream` (tw_wait_stream). The async calls
 * themselves do not wait for a device, except when a name's layout is new. */
TW_API tw_status tw_wait(tw_work* work);
TW_API tw_status tw_wait_stream(tw_work* work, void* stream);
/* Waits and frees the work; drops its status and leaves tw_last_error as it is. */
TW_API void tw_work_destroy(tw_work* work);

typedef enum {
  TW_ALL_REDUCE = 0,
  TW_REDUCE_SCATTER = 1,
  TW_ALL_GATHER = 2,
  TW_ALL_TO_ALL = 3, /* copies: part r of `send` goes to rank r, and part r of `recv` comes from it;
                        both have `count` elements and must not overlap */
  TW_COLLECTIVE_IS_INT = 0x7fffffff
} tw_collective;

/* The description of a bucket. The caller sets struct_size; zero is the default of other fields. */
typedef struct {
  size_t struct_size; /* sizeof(tw_bucket_info) */
  const char* name;   /* as in tw_all_reduce_async */
  size_t count; /* elements of `send`; a multiple of the ranks in a reduce-scatter or all-to-all */
  tw_dtype dtype;
  tw_op op; /* an all-gather and an all-to-all ignore it */
  tw_collective collective;
  int priority;
  const tw_segment* segments; /* null: none; their `absent` is ignored */
  size_t num_segments;
  const char* shape; /* any text, such as "10x100"; TW_MISMATCH if it differs between ranks. Null:
                        only the count is compared */
} tw_bucket_info;

/* The description is read once, and its pointers are not kept. A second bucket may have the same
 * name and another description: the residuals move to the one that is started next. */
TW_API tw_status tw_bucket_create(tw_comm* comm, const tw_bucket_info* info, tw_bucket** bucket);

/* Starts one use of the bucket and returns. After the first use it parses no names and, except for
 * small tensors, which are sent at once, allocates nothing. `absent`: the numbers of the segments
 * that this rank has no gradient for, as in tw_segment. A bucket is not thread-safe: only one
 * thread at a time may use it. */
TW_API tw_status tw_bucket_start(tw_bucket* bucket, const void* send, void* recv, void* stream,
                                 const uint32_t* absent, size_t num_absent);
/* Like tw_bucket_start, but the mean of this use divides by `divisor` in place of the number of
 * ranks. Examples: the sum of the ranks' weights, if each rank has multiplied its elements by its
 * weight; the number of ranks that take part, if the others send zeros. `divisor` is equal on all
 * ranks (else TW_MISMATCH), finite and above 0; 0 means the number of ranks. It requires TW_MEAN
 * and a communicator without tw_options.momentum. */
TW_API tw_status tw_bucket_start_divided(tw_bucket* bucket, const void* send, void* recv,
                                         void* stream, const uint32_t* absent, size_t num_absent,
                                         float divisor);
/* Waits for the use that was started, as tw_wait and tw_wait_stream do. */
TW_API tw_status tw_bucket_wait(tw_bucket* bucket);
TW_API tw_status tw_bucket_wait_stream(tw_bucket* bucket, void* stream);
/* Call it after the last wait. The communicator may have been destroyed before. */
TW_API void tw_bucket_destroy(tw_bucket* bucket);

/* Writes a text that tells which rank waits for which, and the engine's last events: at most
 * `capacity` bytes, including the final NUL. *bytes is the size of the whole text. May be called at
 * any time from any thread. */
TW_API tw_status tw_comm_describe(tw_comm* comm, char* text, size_t capacity, size_t* bytes);

/* Returns a 64-bit hash of `bytes` bytes, the same on every rank and build: schedule/hash.h. */
TW_API uint64_t tw_digest(const void* data, size_t bytes);

/* Encode or decode one shard of compress/FORMAT.md on the host, with the first hop's codec if the
 * spec has two. `residual` is null, or n floats that are updated in place. A malformed shard is
 * TW_INVALID_ARGUMENT. */
TW_API tw_status tw_encoded_bytes(const char* spec, size_t n, size_t* bytes);
TW_API tw_status tw_encode(const char* spec, const float* x, size_t n, float* residual, void* out,
                           size_t capacity, size_t* bytes);
TW_API tw_status tw_decode(const char* spec, const void* in, size_t bytes, float* x, size_t n);
/* Decodes and averages the updates of `count` members: x = factors[0] * in[0] + factors[1] *
 * in[1] + ..., each product and each sum rounded to fp32, in this order. in[m] has `bytes` bytes:
 * shards of `shard` elements one after another, of which the last may be shorter. Adds to the
 * 2 * count + 1 `products` the sum of squares of each in[m], the inner product of each in[m] and x,
 * and the sum of squares of x, in fp64, with the same bits on every CPU. After a malformed shard
 * the contents of x are unspecified. */
TW_API tw_status tw_decode_mean(const char* spec, const void* const* in, size_t bytes,
                                const float* factors, size_t count, size_t shard, float* x,
                                size_t n, double* products);

/* How much a codec's accuracy depends on compressing the momentum (tw_options.momentum) in place of
 * the gradient. */
typedef enum {
  TW_MOMENTUM_UNUSED = 0,  /* the bare gradient works as well */
  TW_MOMENTUM_HELPS = 1,   /* the momentum does better */
  TW_MOMENTUM_ADVISED = 2, /* the bare gradient loses accuracy */
  TW_MOMENTUM_REQUIRED = 3 /* the bare gradient diverges */
} tw_momentum_need;

/* A codec and one spec of it. The caller sets struct_size only. The pointers are to strings that
 * live as long as the library. */
typedef struct {
  size_t struct_size;        /* sizeof(tw_codec) */
  const char* name;          /* of the first hop's codec: "int4" */
  const char* help;          /* one sentence about it */
  char spec[256];            /* the canonical spec of both hops */
  char up[128], down[128];   /* the canonical spec of each hop; equal where there is one hop */
  double up_bits, down_bits; /* of one element of a large shard, scales included */
  int entries;               /* non-zero: every rank gets all entries, and there is no second hop */
  int uses_feedback;         /* non-zero: it keeps residuals (error feedback) */
  int has_kernels;           /* non-zero: it runs on devices, not only on the CPU */
  tw_momentum_need momentum; /* the stronger need of the two hops */
  size_t num_parameters;     /* of the first hop's codec; down=SPEC is not counted */
} tw_codec;

/* A parameter of a spec's first hop. The caller sets struct_size only. */
typedef struct {
  size_t struct_size;     /* sizeof(tw_parameter) */
  const char* key;        /* "block" */
  const char* range;      /* "a power of two from 128 to 4096" */
  const char* help;       /* one sentence */
  char default_value[64]; /* "256" */
  char value[64];         /* the value in this spec */
} tw_parameter;

/* Returns the name of codec number `index`, counted from 0, or null after the last one. */
TW_API const char* tw_codec_name(size_t index);
TW_API tw_status tw_codec_info(const char* spec, tw_codec* codec);
TW_API tw_status tw_codec_parameter(const char* spec, size_t index, tw_parameter* parameter);

/* This struct has no struct_size, so it never grows: new counters get a new function. The same
 * holds for tw_store, which lies inside tw_options, and for tw_segment and tw_layer, of which
 * callers make arrays. */
typedef struct {
  uint64_t all_reduces, raw_bytes, wire_bytes; /* raw: a ring allreduce of fp32 would have sent
                                                  them; wire: this rank has sent them */
  uint64_t planned_chunks;                     /* chunks whose order was predicted */
  double queue_s, encode_s, exchange_s, reduce_s, gather_s, decode_s;
} tw_stats;
TW_API tw_status tw_comm_stats(tw_comm* comm, tw_stats* stats);

/* Writes the spec that codec `index` of options.codec became: topk becomes int4 if that costs fewer
 * bytes. */
TW_API tw_status tw_comm_codec(tw_comm* comm, size_t index, char* spec, size_t capacity);

/* Writes the transport of the data, such as "gloo over TCP", "ucx 1.13.1 over shared memory" or
 * "nccl 2.30.7". */
TW_API tw_status tw_comm_transport(tw_comm* comm, char* text, size_t capacity);

/* Sets *by_order to 1 if the ranks' exchanges match by their order, as NCCL's do: chunks start in
 * the same order on all ranks, so a missing chunk blocks all later ones. 0: they match by tag. */
TW_API tw_status tw_comm_matches_by_order(tw_comm* comm, int* by_order);

/* Writes the topology of dense allreduces and the reason for it, such as "flat, all ranks are on
 * one node" or "hierarchical: 2 nodes of 2 ranks, each rank sends 812 MB/s inside nodes of 2 and
 * ...". */
TW_API tw_status tw_comm_topology(tw_comm* comm, char* text, size_t capacity);

/* The group's measurements of its nodes: ranks per node, and the bytes per second that each rank
 * sends inside a node and between nodes while all ranks send. All are 0 if nothing was measured:
 * the topology is not "auto", or there are no nodes. */
typedef struct {
  size_t local_size;
  double inside_bytes_per_s, between_bytes_per_s;
} tw_nodes;
TW_API tw_status tw_comm_nodes(tw_comm* comm, tw_nodes* nodes);

/* Writes the version of UCX that would be used; `library` as in tw_options.ucx_library. Returns
 * TW_UNAVAILABLE, and the reason, if there is none. */
TW_API tw_status tw_ucx_version(const char* library, char* text, size_t capacity);

/* The same for NCCL, which it loads; `library` as in tw_options.nccl_library. */
TW_API tw_status tw_nccl_version(const char* library, char* text, size_t capacity);

/* Sets *raw to 1 if tensors of `count` elements are sent uncompressed because they are small. */
TW_API tw_status tw_comm_goes_raw(tw_comm* comm, size_t count, tw_dtype dtype, int* raw);

/* Sets the step number, counted from 0, of the next allreduce of every name; topk's warm-up and
 * stochastic rounding depend on it. Call it with the same number on all ranks to resume a run. */
TW_API tw_status tw_comm_set_step(tw_comm* comm, uint64_t step);

/* Call on every rank after all tensors of a training step were submitted, if the next step will
 * submit the same named tensors; rank 0's call counts. The next step's order may then be predicted
 * (tw_options.planned), which saves an announcement per chunk. If the next step lacks one of these
 * tensors, that costs time; over a transport that matches by order (NCCL) it fails the group. Over
 * such a transport a step may also time out if it waits for a tensor before it submits another one
 * and this step did not. */
TW_API tw_status tw_comm_end_step(tw_comm* comm);

/* Call in place of tw_comm_end_step if the next step may submit other tensors. Nothing is predicted
 * from this step. */
TW_API tw_status tw_comm_forget_step(tw_comm* comm);

/* Read and write the state of each parameter: first-hop and second-hop residuals, and the momentum
 * if the communicator owns it; numel floats each. No allreduce may be in flight. `index` counts
 * parameters in name order. A null `momentum` is not read or not set. */
TW_API tw_status tw_residual_count(tw_comm* comm, size_t* count);
TW_API tw_status tw_residual_info(tw_comm* comm, size_t index, char* name, size_t capacity,
                                  size_t* numel);
TW_API tw_status tw_residual_get(tw_comm* comm, const char* name, float* first, float* second,
                                 float* momentum, size_t numel);
/* After a failure: undoes the changes that the last use of every tensor has made to them, whether
 * it was complete or not. tw_residual_get before and after this call gives both states; the ranks
 * go on with the one that they agree on: docs/how-to/recover.md. */
TW_API tw_status tw_residual_undo(tw_comm* comm);
TW_API tw_status tw_residual_set(tw_comm* comm, const char* name, const float* first,
                                 const float* second, const float* momentum, size_t numel);
/* Read or write several arrays of several parameters in one call, which reads the memory of a
 * bucket once for all of its parameters. get_all writes `values`; an array that the communicator
 * does not keep reads as zeros. set_all reads `values` and replaces the whole state of the named
 * parameters: their arrays that are not listed become zeros. TW_INVALID_ARGUMENT, with nothing
 * written, for a parameter that get_all does not know, or for another number of elements.
 * tw_residual_array has no struct_size, so it never grows. */
typedef struct {
  const char* parameter;
  const char* array; /* "first", "second", "momentum" */
  float* values;
  size_t numel; /* of the parameter */
} tw_residual_array;
TW_API tw_status tw_residual_get_all(tw_comm* comm, const tw_residual_array* arrays, size_t count);
TW_API tw_status tw_residual_set_all(tw_comm* comm, const tw_residual_array* arrays, size_t count);

/* Sets *count to the number of usable CUDA devices. TW_UNAVAILABLE, and the reason, if there is
 * none. */
TW_API tw_status tw_cuda_device_count(const char* cuda_library, int* count);

/* A layer of a model, or several that are reduced together, and its compute times in a step. */
typedef struct {
  size_t numel;
  double forward_s, backward_s;
} tw_layer;

/* A training step on a link, to be simulated: schedule/sim/simulator.h. It grows like tw_options:
 * at the end, by fields of 8 bytes whose zero is the default. */
typedef struct {
  size_t struct_size;        /* sizeof(tw_simulation) */
  const tw_options* options; /* size, codec, policy, lanes, chunk_bytes, min_bytes, no_raw,
                                topology, local_size, transport */
  const tw_layer* layers;    /* in forward order */
  size_t num_layers;
  double between_s;                    /* from the end of backward to the next forward pass */
  int barrier;                         /* non-zero: the next forward pass waits for everything */
  int planned;                         /* non-zero: the order is predicted, not announced */
  double bytes_per_s, latency_s;       /* of each rank's link, one way */
  double burst_bytes;                  /* bytes that an idle link lets pass at once */
  double overhead_s;                   /* of each exchange, in addition to its bytes */
  double encode_s, reduce_s, decode_s; /* of one element of a chunk, on one rank */
  double cpu_s_per_byte;               /* processor time for each byte that a rank sends */
  double contention;         /* how much encode, reduce, decode and sending delay computing, and
                                computing them: 0 with cores to spare, 1 or more without */
  int steps;                 /* steps that the mean is taken over; 0: 4 */
  double inside_bytes_per_s; /* of each rank's link inside a node of options.local_size ranks, if
                                nodes have links of their own; 0: there are no such nodes */
} tw_simulation;

/* Writes the seconds of a step to step_s and, unless bound_s is null, a lower bound for any order
 * of chunks to bound_s. */
TW_API tw_status tw_simulate(const tw_simulation* simulation, double* step_s, double* bound_s);

/* A parameter server. Workers push gradients to keys on servers and pull values from them; the
 * servers apply an optimizer. A member is a worker (tw_kv_create) or a server (tw_kv_serve).
 * Experimental: docs/how-to/parameter-server.md. The struct grows like tw_options. */
typedef struct {
  size_t struct_size; /* sizeof(tw_kv_options) */
  int rank; /* workers are numbered from 0, servers from `workers`, and workers that join a
               run from workers + servers */
  int workers, servers;
  int timeout_ms;              /* of connecting, and of every wait; 0: 60,000 */
  tw_store store;              /* used if store.set is not null, else store_path */
  const char* local_group;     /* else: all members are threads of this process */
  const char* store_path;      /* else: a folder that all members share */
  const char* group;           /* key prefix, a new one for each store and run */
  const char* mode;            /* of a worker: "sync" (default): a step is applied when all workers
                                  have pushed it; "async": a push is applied when it arrives;
                                  "ssp:staleness=k": no gradient is applied that is older than k
                                  updates for each worker; "sync:quorum=k,grace=s": a step is
                                  applied when all workers have pushed it, or s seconds after k
                                  workers have; a late push counts in the next step */
  const char* codec;           /* of a worker: "fp32" (default); "int4:down=int8": gradients up,
                                  values down */
  size_t slice_elements;       /* elements of each slice of a key; a multiple of 4096; 0: 65,536,
                                  or fewer, so that a slice has at most 80 KiB: 16,384 in fp32 */
  size_t bigarray_bound;       /* keys with fewer elements stay whole */
  const char* key_file;        /* as in tw_options */
  const char* interface_name;  /* network interface that a server listens on */
  const char* rendezvous_host; /* a server listens where this host is reached; else loopback */
  const char* zmq_library;     /* path of libzmq.so.5; null: where the dynamic linker looks, then
                                  pyzmq's */
  const char* journal;         /* of a server: "FOLDER" for its journal, from which a killed server
                                  recovers when it is started again with its rank;
                                  "FOLDER,bytes=1073741824,durable=fsync": bytes of input between
                                  two snapshots; input is on the disk before it is answered. Null:
                                  no journal, and a lost server ends the store */
} tw_kv_options;

typedef struct tw_kv tw_kv; /* one worker's store */

TW_API void tw_kv_options_init_sized(tw_kv_options* options, size_t struct_size);
#define tw_kv_options_init(options) tw_kv_options_init_sized((options), sizeof(tw_kv_options))

/* Writes the version of ZeroMQ that a store would use; `library` as in tw_kv_options.zmq_library.
 * TW_UNAVAILABLE, and the reason, if there is none or it is unsuitable. */
TW_API tw_status tw_zmq_version(const char* library, char* text, size_t capacity);

/* Serves on the calling thread until every worker has left. Returns the store's failure, which its
 * workers also get, or the journal's, with the name of its file: TW_INVALID_ARGUMENT (it cannot be
 * written), TW_MISMATCH (it is of other numbers of members, or another process writes it) or
 * TW_DATA_LOSS (it is damaged).
 *
 * A server that was killed after all workers had left, and is started again, may find the
 * rendezvous store gone. The caller then calls this without store, store_path and local_group: if
 * the journal was written within timeout_ms and says that all workers had left, it is removed and
 * the status is TW_OK; else TW_INVALID_ARGUMENT, and the server must wait for that store. */
TW_API tw_status tw_kv_serve(const tw_kv_options* options);

/* Returns when all servers are connected. Only one thread at a time may use a key. Every worker
 * must call tw_kv_set_codec, tw_kv_init, tw_kv_set_optimizer, tw_kv_barrier, tw_kv_save and
 * tw_kv_load in the same order, and not concurrently with any other call on this store. After the
 * first failure every call returns that failure.
 *
 * In all modes but sync a worker may join after the others have set the store up. Its rank is that
 * of a worker that has left, or at least workers + servers. Until its first push, the calls listed
 * above do not wait for the others and do not change the store. TW_MISMATCH in sync, or if the
 * store is set up differently.
 */
TW_API tw_status tw_kv_create(const tw_kv_options* options, tw_kv** kv);
TW_API void tw_kv_destroy(tw_kv* kv); /* waits until the servers have received all pushes */

/* Replaces tw_kv_options.codec for the keys of later calls of tw_kv_init. */
TW_API tw_status tw_kv_set_codec(tw_kv* kv, const char* codec);

/* This struct has no struct_size, so it never grows. */
typedef struct {
  const char* key;
  const void* values;
  size_t count;
  tw_dtype dtype;
  size_t width; /* 0: the value is dense; else it is row-sparse with rows of `width` elements */
} tw_kv_tensor;
/* Adds keys with worker 0's values, uncompressed. */
TW_API tw_status tw_kv_init(tw_kv* kv, const tw_kv_tensor* tensors, size_t count);

/* Tensors are on the host and have as many elements as their key. A pushed tensor may be reused
 * when the call returns; a pulled one may be written until tw_kv_wait returns. A higher priority
 * goes first. tw_kv_push_pull sends one message in place of two. In sync a push blocks while eight
 * earlier pushes of its key are not applied because other workers have not pushed. weight: 1; in
 * mode sync:quorum=k,grace=s any positive number, such as the samples or tokens of a gradient: an
 * update is the weighted mean of its pushes. TW_INVALID_ARGUMENT for any other weight. */
TW_API tw_status tw_kv_push(tw_kv* kv, const char* key, const void* send, size_t count,
                            tw_dtype dtype, int priority, double weight);
TW_API tw_status tw_kv_pull(tw_kv* kv, const char* key, void* recv, size_t count, tw_dtype dtype,
                            int priority);
TW_API tw_status tw_kv_push_pull(tw_kv* kv, const char* key, const void* send, void* recv,
                                 size_t count, tw_dtype dtype, int priority, double weight);

/* The same for a row-sparse key, such as the table of an embedding, of which a step needs a few
 * rows. Row i of send and recv, of `width` elements, is row rows[i] of the key. `count` is the
 * elements of all rows: row_count * width. Rows may come in any order; a row that is listed twice
 * in a push is summed. Servers apply the optimizer to the pushed rows, and leave the other rows and
 * their state unchanged. Each worker's push counts as one, even with no rows. Rows are sent
 * uncompressed, except with bf16 and int8 (which rounds stochastically). TW_INVALID_ARGUMENT for a
 * row that does not exist, or another count. */
TW_API tw_status tw_kv_push_rows(tw_kv* kv, const char* key, const int64_t* rows, size_t row_count,
                                 const void* send, size_t count, tw_dtype dtype, int priority,
                                 double weight);
TW_API tw_status tw_kv_pull_rows(tw_kv* kv, const char* key, const int64_t* rows, size_t row_count,
                                 void* recv, size_t count, tw_dtype dtype, int priority);
/* Both in one message. The pulled rows need not be the pushed ones. */
TW_API tw_status tw_kv_push_pull_rows(tw_kv* kv, const char* key, const int64_t* push_rows,
                                      size_t push_row_count, const void* send, size_t send_count,
                                      const int64_t* pull_rows, size_t pull_row_count, void* recv,
                                      size_t recv_count, tw_dtype dtype, int priority,
                                      double weight);
TW_API tw_status tw_kv_wait(tw_kv* kv, const char* key); /* null: all keys */

/* "sum" (default, in sync only): a pull is the sum of a step's pushes; "add:lr=1", "sgd:lr=0.1,
 * momentum=0.9,nesterov=1,weight_decay=0", "adam:lr=1e-3,beta1=0.9,beta2=0.999,eps=1e-8", "adamw",
 * "adagrad:lr=0.01,lr_decay=0"; each also takes rescale=1, a factor on gradients. A spec with the
 * present optimizer's name and other numbers keeps its state. */
TW_API tw_status tw_kv_set_optimizer(tw_kv* kv, const char* spec);
TW_API tw_status tw_kv_barrier(tw_kv* kv);
/* Worker 0 writes or reads a file with all values and the optimizer's state, and each worker its
 * residuals in PATH.worker-RANK. If a worker cannot write or worker 0 has left, save returns
 * TW_INVALID_ARGUMENT on all workers and keeps the former files. If a file is missing, damaged, of
 * another save, or of another optimizer that keeps arrays, load returns TW_INVALID_ARGUMENT on all
 * workers and changes nothing. */
TW_API tw_status tw_kv_save(tw_kv* kv, const char* path);
TW_API tw_status tw_kv_load(tw_kv* kv, const char* path);

/* Like tw_comm_describe. */
TW_API tw_status tw_kv_describe(tw_kv* kv, char* text, size_t capacity, size_t* bytes);
/* A range of samples for one worker. tw_kv_take hands out the samples of several epochs, in ranges
 * of `batch`, to whichever worker asks; with more than one worker, not in mode sync or with a
 * quorum. */
typedef struct {
  uint64_t epoch, first, count; /* samples [first, first + count); count 0: all are done */
  int waited;                   /* 1: pull before the next push */
} tw_kv_work;
/* `share` numbers the plans (samples, batch, epochs) from 1; all workers pass the same plan for a
 * share. `applied`: how many of this worker's ranges of the share, from its first, have pushes that
 * were applied. If this worker is lost, the ranges after those go to other workers, so a sample is
 * handed out a second time only if its worker was lost. Waits while other workers hold all ranges
 * that are left. */
TW_API tw_status tw_kv_take(tw_kv* kv, uint32_t share, uint64_t samples, uint64_t batch,
                            uint64_t epochs, uint64_t applied, tw_kv_work* work);

/* Sets *joined to 1 if the store was set up before this worker came; never in sync. */
TW_API tw_status tw_kv_has_joined(tw_kv* kv, int* joined);
/* Bytes that this worker has sent so far. */
TW_API tw_status tw_kv_bytes_sent(tw_kv* kv, uint64_t* bytes);

/* Returns the instruction set that the codecs use on this machine: "AVX3", "AVX2", ... */
TW_API const char* tw_simd_target(void);

#ifdef __cplusplus
}
#endif

#endif /* THINWIRE_INTEGRATIONS_C_THINWIRE_H_ */
