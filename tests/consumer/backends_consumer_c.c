/* The backends' C header from a C11 program: a layer is made, and what is wrong is said through the core's message. */
#include <stdio.h>
#include <string.h>

#include "folio/c/backends.h"

int main(void) {
  folio_context* context = NULL;
  folio_flashinfer_layer* layer = NULL;
  folio_layer_config config = FOLIO_LAYER_CONFIG_INIT;
  if (folio_create_cpu_context(NULL, &context) != FOLIO_OK) return 1;
  const int refused = folio_create_flashinfer_layer(context, &config, &layer) == FOLIO_INVALID_ARGUMENT;
  printf("refused: %s\n", folio_last_error());
  const int said = strlen(folio_last_error()) > 0;
  config.num_heads = config.num_kv_heads = 2;
  config.head_size = 64;
  config.scale = 0.125f;
  const int made = folio_create_flashinfer_layer(context, &config, &layer) == FOLIO_OK;
  folio_free_flashinfer_layer(layer);
  folio_free_context(context);
  return refused && said && made ? 0 : 1;
}
