# What a compiler and linker offer against mistakes in memory: for all of Folio's own C and C++ code, of programs and tests too.
# scripts/checks/check_hardening.py looks at the built files. Kernels' arithmetic takes -fno-stack-protector: it has no buffers whose
# size depends on input.
include_guard(GLOBAL)
option(FOLIO_HARDENING "Stack protectors, _FORTIFY_SOURCE, control-flow protection, immediate binding" ON)
if(NOT FOLIO_HARDENING OR NOT CMAKE_CXX_COMPILER_ID MATCHES "GNU|Clang" OR NOT CMAKE_SYSTEM_NAME STREQUAL "Linux")
  return()
endif()
set(folio_own "$<COMPILE_LANGUAGE:C,CXX>")
add_compile_options($<${folio_own}:-fstack-protector-strong>)
# It needs an optimiser, and sanitizers check the same calls better.
add_compile_options("$<$<AND:${folio_own},$<CONFIG:Release,RelWithDebInfo,MinSizeRel>>:SHELL:-U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=2>")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  add_compile_options($<${folio_own}:-fcf-protection>)
endif()
folio_harden_links()
