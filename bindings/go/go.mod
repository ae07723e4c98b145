module folio

go 1.19
