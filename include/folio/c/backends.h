/* The engine backends in C, of the library folio_backends; its users link libfolio too. The rules of folio/c/folio.h
 * hold. Layers are immutable and may be used from several threads at once; builders, metadata and token-pool backends
 * from one at a time. Layers, builders and backends keep what they need of a freed context. */
#ifndef FOLIO_C_BACKENDS_H_
#define FOLIO_C_BACKENDS_H_

#include "folio/c/backends/flash_attn.h"
#include "folio/c/backends/flashinfer.h"
#include "folio/c/backends/step.h"
#include "folio/c/backends/token_pool.h"

#endif /* FOLIO_C_BACKENDS_H_ */
