#ifndef FOLIO_TESTS_CAPI_INIT_MACROS_H_
#define FOLIO_TESTS_CAPI_INIT_MACROS_H_

#ifdef __cplusplus
extern "C" {
#endif

/* The first folio_..._init function that does not write what its FOLIO_..._INIT macro has into memory filled with
 * `fill`, or that writes beyond; "" if all do. */
const char* init_function_unlike_its_macro(int fill);

#ifdef __cplusplus
}
#endif

#endif
