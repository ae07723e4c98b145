# Installs the libraries as the CMake package `folio` (targets folio::folio, folio::backends, folio::testing) and the
# pkg-config modules `folio`, `folio-backends` and `folio-testing`.
#
# Install components, for packagers: `shared` (libfolio.so and its links), `static` (libfolio.a), of the other two libraries
# `backends-shared`, `backends-static`, `testing-shared`, `testing-static`; `development` (headers, CMake package,
# pkg-config), `mpi` (libfolio_mpi.a, where MPI was found), `nccl` (libfolio_nccl.a, where CUDA and nccl.h were found) and
# `tools` (the program folio), `tools-mpi` (what it loads under mpirun). Without --component everything is installed.
include_guard(GLOBAL)
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(folio_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/folio)

# folio_install_library(TARGET NAME KIND): KIND is `shared` or `static`; NAME is empty for the core, else `backends-` or
# `testing-`. Each is an export set of its own, so that one installation can hold any of them; folioConfig.cmake loads
# those that are asked for.
function(folio_install_library target name kind)
  install(TARGETS ${target} EXPORT folio-${name}${kind}
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT ${name}${kind}
    ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT ${name}${kind})
  install(EXPORT folio-${name}${kind} FILE folio-${name}${kind}-targets.cmake NAMESPACE folio::
    DESTINATION ${folio_package_dir} COMPONENT ${name}${kind})
endfunction()

foreach(library IN ITEMS folio folio_backends folio_testing)
  string(REGEX REPLACE "^folio_?(.*)$" "\\1" name ${library})
  if(name)
    string(APPEND name "-")
  endif()
  if(BUILD_SHARED_LIBS)
    folio_install_library(${library} "${name}" shared)
    if(TARGET ${library}_static)
      folio_install_library(${library}_static "${name}" static)
    endif()
  else()
    folio_install_library(${library} "${name}" static)
  endif()
endforeach()

# The groups: always static, whichever libfolio they go with.
foreach(group IN ITEMS mpi nccl)
  if(TARGET folio_${group})
    set_target_properties(folio_${group} PROPERTIES EXPORT_NAME ${group})
    install(TARGETS folio_${group} EXPORT folio-${group} ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT ${group})
    install(EXPORT folio-${group} FILE folio-${group}-targets.cmake NAMESPACE folio:: DESTINATION ${folio_package_dir}
      COMPONENT ${group})
  endif()
endforeach()

if(TARGET folio_cli)
  file(RELATIVE_PATH folio_bin_to_lib /${CMAKE_INSTALL_BINDIR} /${CMAKE_INSTALL_LIBDIR})
  set_target_properties(folio_cli PROPERTIES INSTALL_RPATH "${FOLIO_ORIGIN}/${folio_bin_to_lib}")
  install(TARGETS folio_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT tools)
  if(TARGET folio_cli_mpi)
    set_target_properties(folio_cli_mpi PROPERTIES INSTALL_RPATH ${FOLIO_ORIGIN})
    install(TARGETS folio_cli_mpi LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT tools-mpi)
  endif()
endif()

install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/folio DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT development
  FILES_MATCHING PATTERN "*.hpp" PATTERN "*.h")
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT development)

# Before 1.0 a minor version may change the API, so only the same minor version satisfies find_package(folio 0.1).
write_basic_package_version_file(${PROJECT_BINARY_DIR}/folioConfigVersion.cmake COMPATIBILITY SameMinorVersion)
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/folioConfig.cmake.in ${PROJECT_BINARY_DIR}/folioConfig.cmake
  INSTALL_DESTINATION ${folio_package_dir} NO_SET_AND_CHECK_MACRO)
install(FILES ${PROJECT_BINARY_DIR}/folioConfig.cmake ${PROJECT_BINARY_DIR}/folioConfigVersion.cmake
  DESTINATION ${folio_package_dir} COMPONENT development)

# The .pc files find their prefix from their own place, so that an installation can be moved.
file(RELATIVE_PATH folio_pc_to_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
set(folio_pc_libs_private "-pthread -lstdc++ -lm")
if(FOLIO_HAS_CUDA)
  string(APPEND folio_pc_libs_private " -L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -lrt -ldl")
endif()
function(folio_install_pc name library description requires)
  set(folio_pc_name ${name})
  set(folio_pc_library ${library})
  set(folio_pc_description ${description})
  set(folio_pc_requires ${requires})
  configure_file(${PROJECT_SOURCE_DIR}/cmake/folio.pc.in ${PROJECT_BINARY_DIR}/${name}.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/${name}.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT development)
endfunction()
folio_install_pc(folio folio "${PROJECT_DESCRIPTION}" "")
folio_install_pc(folio-backends folio_backends "Engine backends of Folio" "folio = ${PROJECT_VERSION}")
folio_install_pc(folio-testing folio_testing "Conformance cases and float64 oracle of Folio" "folio = ${PROJECT_VERSION}")
