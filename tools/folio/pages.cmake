# Manual pages and completion scripts, written by the program from its option tables, and where they are installed. A
# cross build has a program that does not run here: it has none.
if(CMAKE_CROSSCOMPILING)
  return()
endif()
set(pages ${CMAKE_CURRENT_BINARY_DIR}/pages)
set(page_files ${pages}/folio.1)
set(write_pages COMMAND ${CMAKE_COMMAND} -E make_directory ${pages} COMMAND $<TARGET_FILE:folio_cli> man > ${pages}/folio.1)
foreach(subcommand replay report info bench verify man completion)
  list(APPEND page_files ${pages}/folio-${subcommand}.1)
  list(APPEND write_pages COMMAND $<TARGET_FILE:folio_cli> man ${subcommand} > ${pages}/folio-${subcommand}.1)
endforeach()
set(completion_files ${pages}/folio.bash ${pages}/_folio ${pages}/folio.fish)
list(APPEND write_pages
  COMMAND $<TARGET_FILE:folio_cli> completion bash > ${pages}/folio.bash
  COMMAND $<TARGET_FILE:folio_cli> completion zsh > ${pages}/_folio
  COMMAND $<TARGET_FILE:folio_cli> completion fish > ${pages}/folio.fish)
add_custom_command(OUTPUT ${page_files} ${completion_files} ${write_pages} DEPENDS folio_cli
  COMMENT "Writing manual pages and completion scripts" VERBATIM)
add_custom_target(folio_pages ALL DEPENDS ${page_files} ${completion_files})

if(FOLIO_INSTALL)
  include(GNUInstallDirs)
  install(FILES ${page_files} DESTINATION ${CMAKE_INSTALL_MANDIR}/man1 COMPONENT tools)
  install(FILES ${pages}/folio.bash DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions RENAME folio COMPONENT tools)
  install(FILES ${pages}/_folio DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/site-functions COMPONENT tools)
  install(FILES ${pages}/folio.fish DESTINATION ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d COMPONENT tools)
endif()
