/* The C header from a C11 program. */
#include <stdio.h>
#include <string.h>

#include "folio/c/folio.h"

int main(void) {
  const char* version = folio_version();
  printf("folio %s\n", version);
  return strlen(version) > 0 ? 0 : 1;
}
