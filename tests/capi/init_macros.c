/* What a C program gets from the header's macros, and from the functions for languages that have none. */
#include "init_macros.h"

#include <string.h>

#include "folio/c/folio.h"

/* Static, so that padding is 0 on both sides. */
static const folio_context_options context_options = FOLIO_CONTEXT_OPTIONS_INIT;
static const folio_attention_config attention_config = FOLIO_ATTENTION_CONFIG_INIT;
static const folio_prepare_options prepare_options = FOLIO_PREPARE_OPTIONS_INIT;
static const folio_kv_segment kv_segment = FOLIO_KV_SEGMENT_INIT;
static const folio_batch batch = FOLIO_BATCH_INIT;
static const folio_segment_args segment_args = FOLIO_SEGMENT_ARGS_INIT;
static const folio_attention_args attention_args = FOLIO_ATTENTION_ARGS_INIT;
static const folio_cache_write_args cache_write_args = FOLIO_CACHE_WRITE_ARGS_INIT;
static const folio_op_info op_info = FOLIO_OP_INFO_INIT;
static const folio_plan_summary plan_summary = FOLIO_PLAN_SUMMARY_INIT;
static const folio_kv_pool_config kv_pool_config = FOLIO_KV_POOL_CONFIG_INIT;
static const folio_prefix_cache_options prefix_cache_options = FOLIO_PREFIX_CACHE_OPTIONS_INIT;
static const folio_prefix_cache_sizes prefix_cache_sizes = FOLIO_PREFIX_CACHE_SIZES_INIT;
static const folio_scale scale = FOLIO_SCALE_INIT;
static const folio_kv_shard kv_shard = FOLIO_KV_SHARD_INIT;
static const folio_token_scales token_scales = FOLIO_TOKEN_SCALES_INIT;

#define DIFFERS(name)                                                                          \
  memset(memory, fill, sizeof(memory));                                                        \
  if (folio_##name##_init((folio_##name*)memory, sizeof(name)) != FOLIO_OK ||                  \
      memcmp(memory, &name, sizeof(name)) != 0 || memory[sizeof(name)] != (unsigned char)fill) \
    return "folio_" #name "_init";

#define DIFFERS_FIXED(name)                                                                               \
  memset(memory, fill, sizeof(memory));                                                                   \
  if (folio_##name##_init((folio_##name*)memory) != FOLIO_OK || memcmp(memory, &name, sizeof(name)) != 0) \
    return "folio_" #name "_init";

const char* init_function_unlike_its_macro(int fill) {
  _Alignas(16) static unsigned char memory[1024];
  DIFFERS(context_options)
  DIFFERS(attention_config)
  DIFFERS(prepare_options)
  DIFFERS(kv_segment)
  DIFFERS(batch)
  DIFFERS(segment_args)
  DIFFERS(attention_args)
  DIFFERS(cache_write_args)
  DIFFERS(op_info)
  DIFFERS(plan_summary)
  DIFFERS(kv_pool_config)
  DIFFERS(prefix_cache_options)
  DIFFERS(prefix_cache_sizes)
  DIFFERS_FIXED(scale)
  DIFFERS_FIXED(kv_shard)
  DIFFERS_FIXED(token_scales)
  return "";
}
