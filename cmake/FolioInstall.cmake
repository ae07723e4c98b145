# Installs the library as the CMake package `folio` (target folio::folio) and the pkg-config module `folio`.
#
# Install components, for packagers: `shared` (libfolio.so and its links), `static` (libfolio.a), `development` (headers,
# CMake package, pkg-config), `mpi` (libfolio_mpi.a, where MPI was found) and `tools` (the program folio). Without --component everything is installed.
include_guard(GLOBAL)
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(folio_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/folio)

# folio_install_library(TARGET KIND): KIND is `shared` or `static`. Each kind is an export set of its own, so that one
# installation can hold both; folioConfig.cmake loads the one that is asked for.
function(folio_install_library target kind)
  set_target_properties(${target} PROPERTIES EXPORT_NAME folio)
  install(TARGETS ${target} EXPORT folio-${kind}
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT ${kind}
    ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT ${kind})
  install(EXPORT folio-${kind} FILE folio-${kind}-targets.cmake NAMESPACE folio:: DESTINATION ${folio_package_dir}
    COMPONENT ${kind})
endfunction()

if(BUILD_SHARED_LIBS)
  folio_install_library(folio shared)
  if(TARGET folio_static)
    folio_install_library(folio_static static)
  endif()
else()
  folio_install_library(folio static)
endif()

if(TARGET folio_mpi)
  # Always static, whichever libfolio it goes with.
  set_target_properties(folio_mpi PROPERTIES EXPORT_NAME mpi)
  install(TARGETS folio_mpi EXPORT folio-mpi ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT mpi)
  install(EXPORT folio-mpi FILE folio-mpi-targets.cmake NAMESPACE folio:: DESTINATION ${folio_package_dir} COMPONENT mpi)
endif()

if(TARGET folio_cli)
  file(RELATIVE_PATH folio_bin_to_lib /${CMAKE_INSTALL_BINDIR} /${CMAKE_INSTALL_LIBDIR})
  set_target_properties(folio_cli PROPERTIES INSTALL_RPATH "$ORIGIN/${folio_bin_to_lib}")
  install(TARGETS folio_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT tools)
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

# The .pc file finds its prefix from its own place, so that an installation can be moved.
file(RELATIVE_PATH folio_pc_to_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
set(folio_pc_libs_private "-pthread -lstdc++ -lm")
if(FOLIO_HAS_CUDA)
  string(APPEND folio_pc_libs_private " -L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -lrt -ldl")
endif()
configure_file(${PROJECT_SOURCE_DIR}/cmake/folio.pc.in ${PROJECT_BINARY_DIR}/folio.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/folio.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT development)
