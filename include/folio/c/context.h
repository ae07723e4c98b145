/* Contexts: a device with its executor. */
#ifndef FOLIO_C_CONTEXT_H_
#define FOLIO_C_CONTEXT_H_

#include "folio/c/types.h"

FOLIO_C_BEGIN

typedef struct folio_context folio_context; /* a device with its executor */

typedef struct folio_context_options {
  uint32_t struct_size;
  int32_t num_threads;          /* 0 = as many as the process may run on; at most 1024; 0 with an executor */
  folio_executor executor;      /* must outlive the context and everything made with it */
  const char* force_kernel;     /* NULL or "": none */
  int32_t allow_fp8_mma;        /* not 0: of every op; as folio_prepare_options.allow_fp8_mma, either permits */
  int32_t validate_tables;      /* not 0: runs check page tables first; see folio::ContextOptions::validate_tables */
  folio_thread_pinning pinning; /* of Folio's own pool; 0 with an executor and on a GPU */
  int32_t reserved;             /* 0 */
} folio_context_options;
#define FOLIO_CONTEXT_OPTIONS_INIT \
  { (uint32_t)sizeof(folio_context_options), 0, {NULL, 0, NULL}, NULL, 0, 0, FOLIO_PINNING_AUTOMATIC, 0 }

/* Every default of a structure, as its ..._INIT macro has them, into memory with any content. struct_size: its size
 * where the caller was compiled, sizeof(folio_...). */
FOLIO_C_API folio_status folio_context_options_init(folio_context_options* options,
                                                    size_t struct_size) FOLIO_C_NOEXCEPT;

/* A CPU context; options NULL = the defaults. */
FOLIO_C_API folio_status folio_create_cpu_context(const folio_context_options* options,
                                                  folio_context** context) FOLIO_C_NOEXCEPT;
/* A CUDA context: FOLIO_UNAVAILABLE where this build has no CUDA kernels or there is no such device. */
FOLIO_C_API folio_status folio_create_cuda_context(int32_t index, const folio_context_options* options,
                                                   folio_context** context) FOLIO_C_NOEXCEPT;
/* NULL is fine. Ops, buffers and pools keep what they need of a freed context; executors must live on. */
FOLIO_C_API void folio_free_context(folio_context* context) FOLIO_C_NOEXCEPT;

typedef int32_t folio_device_type;
enum { FOLIO_DEVICE_CPU = 0, FOLIO_DEVICE_CUDA = 1 };

/* index: the CUDA ordinal; 0 of a CPU. */
FOLIO_C_API folio_status folio_get_device(const folio_context* context, folio_device_type* type,
                                          int32_t* index) FOLIO_C_NOEXCEPT;
/* How many pieces of work make progress at once: the executor's; the SMs of a GPU. */
FOLIO_C_API folio_status folio_concurrency(const folio_context* context, int32_t* concurrency) FOLIO_C_NOEXCEPT;
/* Waits for everything on `stream` and reports what went wrong there (FOLIO_DEVICE_ERROR). A CPU enqueues nothing. */
FOLIO_C_API folio_status folio_synchronize(const folio_context* context, void* stream) FOLIO_C_NOEXCEPT;
/* Lets the context's GPU use host memory at the host's address, from a page's begin on, and takes that back. Unmapping
 * never fails. FOLIO_UNSUPPORTED on a CPU. */
FOLIO_C_API folio_status folio_map_host_memory(const folio_context* context, void* data, size_t bytes) FOLIO_C_NOEXCEPT;
FOLIO_C_API folio_status folio_unmap_host_memory(const folio_context* context, void* data) FOLIO_C_NOEXCEPT;
/* The instruction sets that CPU and OS grant, sorted, separated by spaces. Lives as long as the process. */
FOLIO_C_API folio_status folio_cpu_features(const char** features) FOLIO_C_NOEXCEPT;

FOLIO_C_END

#endif /* FOLIO_C_CONTEXT_H_ */
