# What linkers of different systems spell differently, in this file alone: ELF's version scripts, which say what a library exports
# and under which version, and where a program looks for libraries beside it.
include_guard(GLOBAL)
set(FOLIO_ORIGIN "$ORIGIN")
if(APPLE)
  set(FOLIO_ORIGIN "@loader_path")
endif()

# folio_export_by(TARGET MAP): exports what the version script MAP says. Elsewhere than on ELF systems it is what FOLIO_API marks.
function(folio_export_by target map)
  if(APPLE)
    return()
  endif()
  target_link_options(${target} PRIVATE -Wl,--version-script=${map})
  set_target_properties(${target} PROPERTIES LINK_DEPENDS ${map})
endfunction()

# folio_link_libstdcxx_in(TARGET): libstdc++ becomes part of it; libgcc_s stays shared: one unwinder in the process. What is not used is
# dropped, or libstdc++'s random_device would ask for a newer glibc than all the rest does.
function(folio_link_libstdcxx_in target)
  target_link_options(${target} PRIVATE -static-libstdc++)
  if(NOT APPLE)
    target_link_options(${target} PRIVATE -Wl,--gc-sections)
  endif()
endfunction()

# folio_harden_links(): relocations are read-only once a program runs.
function(folio_harden_links)
  if(CMAKE_SYSTEM_NAME STREQUAL "Linux")
    set_property(DIRECTORY ${PROJECT_SOURCE_DIR} APPEND PROPERTY LINK_OPTIONS -Wl,-z,relro -Wl,-z,now)
  endif()
endfunction()
