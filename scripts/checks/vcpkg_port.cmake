# Runs the port of packaging/vcpkg with stand-ins for the functions of vcpkg that it calls, for a release build alone: what the port
# passes to CMake configures and builds, and what it leaves is where a consumer looks. vcpkg itself, where it is there, is better.
#
#   cmake -DPACKAGES=DIRECTORY -DVCPKG_LIBRARY_LINKAGE=dynamic|static [-DEXTRA_OPTIONS=...] -P scripts/checks/vcpkg_port.cmake
cmake_minimum_required(VERSION 3.22)
set(port ${CMAKE_CURRENT_LIST_DIR}/../../packaging/vcpkg/folio)
set(CURRENT_PACKAGES_DIR ${PACKAGES})
set(build ${PACKAGES}-build)
file(REMOVE_RECURSE ${PACKAGES})

file(READ ${port}/vcpkg.json manifest)
file(READ ${port}/../../../include/folio/version.hpp header)
string(JSON version GET "${manifest}" version)
if(NOT header MATCHES "FOLIO_VERSION_STRING \"${version}\"")
  message(FATAL_ERROR "packaging/vcpkg/folio/vcpkg.json is of version ${version}, the sources are not")
endif()

function(vcpkg_check_features)
  cmake_parse_arguments(A "" "OUT_FEATURE_OPTIONS" "FEATURES" ${ARGN})
  set(options "")
  while(A_FEATURES)
    list(POP_FRONT A_FEATURES feature option)
    string(JSON description GET "${manifest}" features ${feature} description)  # fails where the manifest has no such feature
    list(APPEND options -D${option}=OFF)
  endwhile()
  set(${A_OUT_FEATURE_OPTIONS} ${options} PARENT_SCOPE)
endfunction()

function(vcpkg_cmake_configure)
  cmake_parse_arguments(A "" "SOURCE_PATH" "OPTIONS" ${ARGN})
  set(shared OFF)
  if(VCPKG_LIBRARY_LINKAGE STREQUAL "dynamic")
    set(shared ON)
  endif()
  execute_process(COMMAND ${CMAKE_COMMAND} -S ${A_SOURCE_PATH} -B ${build} -G Ninja -DCMAKE_BUILD_TYPE=Release
    -DBUILD_SHARED_LIBS=${shared} -DCMAKE_INSTALL_PREFIX=${PACKAGES} -DCMAKE_INSTALL_LIBDIR=lib ${A_OPTIONS} ${EXTRA_OPTIONS}
    --no-warn-unused-cli COMMAND_ERROR_IS_FATAL ANY)
endfunction()

function(vcpkg_cmake_install)
  execute_process(COMMAND ${CMAKE_COMMAND} --build ${build} COMMAND_ERROR_IS_FATAL ANY)
  execute_process(COMMAND ${CMAKE_COMMAND} --install ${build} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

function(vcpkg_cmake_config_fixup)  # the real one moves the files to share/folio, and changes the paths in them
  cmake_parse_arguments(A "" "PACKAGE_NAME;CONFIG_PATH" "" ${ARGN})
  if(NOT EXISTS ${PACKAGES}/${A_CONFIG_PATH}/${A_PACKAGE_NAME}Config.cmake)
    message(FATAL_ERROR "${A_CONFIG_PATH} has no package ${A_PACKAGE_NAME}")
  endif()
endfunction()

function(vcpkg_fixup_pkgconfig)
  file(GLOB modules ${PACKAGES}/lib/pkgconfig/*.pc)
  if(NOT modules)
    message(FATAL_ERROR "lib/pkgconfig has no module")
  endif()
endfunction()

function(vcpkg_install_copyright)
  cmake_parse_arguments(A "" "" "FILE_LIST" ${ARGN})
  file(INSTALL ${A_FILE_LIST} DESTINATION ${PACKAGES}/share/folio)
endfunction()

include(${port}/portfile.cmake)
