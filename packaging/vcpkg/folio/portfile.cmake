# An overlay port: it builds the sources that it stands in.
get_filename_component(SOURCE_PATH "${CMAKE_CURRENT_LIST_DIR}/../../.." ABSOLUTE)

vcpkg_check_features(OUT_FEATURE_OPTIONS FEATURE_OPTIONS
  FEATURES
    cuda FOLIO_CUDA
    mpi FOLIO_MPI)
vcpkg_cmake_configure(
  SOURCE_PATH "${SOURCE_PATH}"
  OPTIONS
    ${FEATURE_OPTIONS}
    -DFOLIO_NCCL=OFF
    -DFOLIO_BUILD_TESTS=OFF
    -DFOLIO_BUILD_TOOLS=OFF
    -DFOLIO_BUILD_EXAMPLES=OFF
    -DFOLIO_BUILD_PYTHON=OFF
    -DFOLIO_BUILD_STATIC_TOO=OFF
    -DFOLIO_SOURCES_TOGETHER=16)
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(PACKAGE_NAME folio CONFIG_PATH lib/cmake/folio)
vcpkg_fixup_pkgconfig()

file(REMOVE_RECURSE "${CURRENT_PACKAGES_DIR}/debug/include" "${CURRENT_PACKAGES_DIR}/debug/share" "${CURRENT_PACKAGES_DIR}/share/doc")
vcpkg_install_copyright(FILE_LIST "${SOURCE_PATH}/LICENSE")
