# Vega-Lite for the pages of `folio report`: a script that the Python package vl-convert-python holds, written out at build
# time. FOLIO_REPORT: AUTO takes it where there is that package, ON insists, OFF does without. Without it `folio report`
# says so and makes no page.
#
# folio_vega_bundle(SCRIPT LICENCES): writes both files, empty ones where there is no package; sets FOLIO_HAS_VEGA.
set(FOLIO_REPORT AUTO CACHE STRING "Vega-Lite in the folio program, for folio report: AUTO, ON or OFF")
set_property(CACHE FOLIO_REPORT PROPERTY STRINGS AUTO ON OFF)
set(FOLIO_REPORT_PYTHON "" CACHE FILEPATH "A Python that has vl-convert-python; empty: build/python's, or the one on the path")

function(folio_vega_bundle script licences)
  set(FOLIO_HAS_VEGA OFF PARENT_SCOPE)
  if(NOT FOLIO_REPORT MATCHES "^(AUTO|ON|OFF)$")
    message(FATAL_ERROR "FOLIO_REPORT is '${FOLIO_REPORT}'; it takes AUTO, ON and OFF")
  endif()
  set(python "")
  if(NOT FOLIO_REPORT STREQUAL "OFF")
    find_package(Python3 COMPONENTS Interpreter QUIET)
    # The environment of scripts/install_deps.sh first.
    foreach(candidate ${PROJECT_SOURCE_DIR}/build/python/bin/python ${FOLIO_REPORT_PYTHON} ${Python3_EXECUTABLE})
      if(python STREQUAL "" AND EXISTS "${candidate}")
        execute_process(COMMAND ${candidate} -c "import vl_convert" RESULT_VARIABLE failed OUTPUT_QUIET ERROR_QUIET)
        if(NOT failed)
          set(python ${candidate})
        endif()
      endif()
    endforeach()
  endif()
  if(python STREQUAL "")
    if(FOLIO_REPORT STREQUAL "ON")
      message(FATAL_ERROR "FOLIO_REPORT is ON, but no Python has the package vl-convert-python: scripts/install_deps.sh report, "
        "or name one that has it by FOLIO_REPORT_PYTHON")
    endif()
    file(CONFIGURE OUTPUT ${script} CONTENT "")
    file(CONFIGURE OUTPUT ${licences} CONTENT "")
    message(STATUS "folio report: no Vega-Lite (vl-convert-python), so that it makes no pages")
    return()
  endif()
  add_custom_command(OUTPUT ${script} ${licences}
    COMMAND ${python} ${PROJECT_SOURCE_DIR}/tools/folio/report/vega_bundle.py ${script} ${licences}
    DEPENDS ${PROJECT_SOURCE_DIR}/tools/folio/report/vega_bundle.py
    COMMENT "Writing Vega-Lite for folio report" VERBATIM)
  set(FOLIO_HAS_VEGA ON PARENT_SCOPE)
endfunction()
