/* The C interface of Folio: C11 and C++. This header has all of libfolio; folio/c/backends.h has the engine backends of
 * libfolio_backends. docs/c_api.md is the users' page.
 *
 * Every function that can fail returns a folio_status; on failure folio_last_error() says why, output handles are set
 * to NULL and other outputs are left as they are. No exception crosses this interface. Null is refused for every
 * pointer unless its comment says otherwise; an array of no elements may be null.
 *
 * Structures that may grow start with struct_size. The FOLIO_..._INIT macros set it, with every default; so do the
 * folio_..._init functions, for languages without macros. Memory of zeros is no such structure: struct_size 0 is
 * refused. Fields of a later version have 0 as their default. A library older than the header refuses fields it does
 * not know, unless they are 0. Structures without struct_size never change; in them zero is the default or is refused.
 *
 * folio_create_... gives its caller a handle; folio_free_... takes it back, once, in any order. Contexts and ops may be
 * used from several threads at once; every other handle from one at a time. Memory given to a call is borrowed: on a
 * CPU until the call returns. */
#ifndef FOLIO_C_FOLIO_H_
#define FOLIO_C_FOLIO_H_

#include "folio/c/attention.h"
#include "folio/c/cache.h"
#include "folio/c/context.h"
#include "folio/c/merge.h"
#include "folio/c/pools.h"
#include "folio/c/prefix_cache.h"
#include "folio/c/quantize.h"
#include "folio/c/tables.h"
#include "folio/c/types.h"

#endif /* FOLIO_C_FOLIO_H_ */
